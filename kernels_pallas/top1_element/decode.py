"""Top-1 Element attention for one new token against a cache.

It scores all keys and reads one value, half the cache traffic of softmax attention. The result equals the parallel form
at every position. Source: arXiv 2505.18522, Top-1 Element.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import backend, validation
from kernels_pallas.top1_element import triton, xla

BACKENDS = (triton.DECODE_BACKEND, xla.DECODE_BACKEND)


def top1_element_decode(
    q_BHK: Float[Array, "B H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGV: Float[Array, "B S G V"],
    length: Int[Array, ""] | int,
    *,
    implementation: str | None = None,
) -> Float[Array, "B H V"]:
    """Return the value of the newest token's best key, bit for bit.

    The candidates are the first `length` keys of the cache.

    Args:
      q_BHK: the newest token's queries.
      k_BSGK: key cache of static length S; includes the newest key.
      v_BSGV: value cache.
      length: tokens in the cache, 1 <= length <= S; an int or an int scalar, may be traced.
      implementation: as in `top1_element_attention`.

    Returns:
      o_BHV in v's dtype; ties go to the earliest key.

    Raises:
      ValueError: shapes that disagree.
      BackendError: (a ValueError) the selected implementation cannot run this.

    Source: arXiv 2505.18522, Top-1 Element.
    """
    validation.check_decode(q_BHK.shape, k_BSGK.shape, v_BSGV.shape)
    kernels = backend.pick("top1_element_decode", BACKENDS, implementation, (q_BHK, k_BSGK, v_BSGV), {})
    return kernels.decode(q_BHK, k_BSGK, v_BSGV, jnp.asarray(length, jnp.int32))
