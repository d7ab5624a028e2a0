"""Top-1 Chunk attention as a differentiable function over interchangeable backends.

    sel = stop_gradient(select(q, k));  o = softmax over {selected chunk} and {own chunk up to the query}

There is no gradient through the selection, as in the paper (arXiv 2505.18522): q and k learn from the softmax
over the keys that were read. The forward rule names what the backward rule needs, `top1_selection` (int32),
`attention_out` and `attention_lse`, with `jax.ad_checkpoint.checkpoint_name`, so that a rematerialised layer
whose policy saves these names does not repeat the quadratic selection. Reverse mode only, once: neither `jvp`
nor a second derivative is defined.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from kernels_pallas import checks, dispatch

SELECTIONS = ("exact", "approx")


class Call(NamedTuple):
    """The static half of a call: backends and numbers."""

    select: Any  # a function (q, k, *, chunk_size, selection, scale) -> sel_BTH
    attend: Any  # an object with `fused`, `forward` and `backward` (see xla.Attend)
    chunk_size: int
    selection: str
    scale: float


def top1_chunk_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    *,
    chunk_size: int = 128,
    selection: str = "exact",
    scale: float | None = None,
    implementation: str | None = None,
    schedule: str | None = None,
) -> Float[Array, "B T H V"]:
    """Causal attention over the own chunk and the one past chunk that each query and head selects.

    Args:
      q_BTHK: queries, fp32, bf16 or fp16 (fp64 under x64); any T >= 1.
      k_BTGK: keys; G divides H, query head h reads key-value head h // (H // G).
      v_BTGV: values.
      chunk_size: keys per chunk, C.
      selection: "exact" (largest softmax mass) or "approx" (largest q . mean key).
      scale: of the scores; 1 / sqrt(K) when None.
      implementation: None picks the best backend that can run this; a name gets that one or an error.
      schedule: for tests and benchmarks of the xla backend: "masked", "sorted" or None (by length).

    Returns:
      o_BTHV in v's dtype. Scores, softmax and sums are fp32.

    Raises:
      ValueError: shapes that disagree, an unknown selection, a chunk_size below 1.
      BackendError: (a ValueError) the named implementation cannot run this.

    Source: arXiv 2505.18522, Top-1 Chunk (Exact and Approx.).
    """
    checks.check_attention(q_BTHK.shape, k_BTGK.shape, v_BTGV.shape)
    checks.check_chunk_size(chunk_size)
    checks.check_choice("selection", selection, SELECTIONS)
    options = {"chunk_size": chunk_size, "selection": selection}
    selector = dispatch.pick("select_chunk", implementation, (q_BTHK, k_BTGK), options)
    attender = dispatch.pick("top1_chunk_attention", implementation, (q_BTHK, k_BTGK, v_BTGV), options)
    scale = checks.resolve_scale(scale, q_BTHK.shape[-1])
    call = Call(selector.select, attender.attend(schedule), chunk_size, selection, scale)
    return _attention(q_BTHK, k_BTGK, v_BTGV, call)


def select_chunk(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    *,
    chunk_size: int = 128,
    selection: str = "exact",
    scale: float | None = None,
    implementation: str | None = None,
) -> Int32[Array, "B T H"]:
    """The chunk that every query and head selects among its full past chunks: -1 in the first chunk, ties to
    the smallest.

    Arguments and errors as in `top1_chunk_attention`. Not differentiable: the result is an integer.
    """
    checks.check_attention(q_BTHK.shape, k_BTGK.shape)
    checks.check_chunk_size(chunk_size)
    checks.check_choice("selection", selection, SELECTIONS)
    options = {"chunk_size": chunk_size, "selection": selection}
    selector = dispatch.pick("select_chunk", implementation, (q_BTHK, k_BTGK), options)
    scale = checks.resolve_scale(scale, q_BTHK.shape[-1])
    q_BTHK, k_BTGK = jax.lax.stop_gradient((q_BTHK, k_BTGK))
    return selector.select(q_BTHK, k_BTGK, chunk_size=chunk_size, selection=selection, scale=scale)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, call: Call) -> Array:
    return _forward(q_BTHK, k_BTGK, v_BTGV, call)[0]


def _forward(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, call: Call) -> tuple[Array, tuple]:
    options = {"chunk_size": call.chunk_size, "selection": call.selection, "scale": call.scale}
    done = call.attend.fused(q_BTHK, k_BTGK, v_BTGV, **options)
    sel_BTH = call.select(q_BTHK, k_BTGK, **options) if done is None else done[0]
    # named before use, so that a policy which saves only the selection also skips it when the rest is
    # recomputed
    sel_BTH = checkpoint_name(sel_BTH, "top1_selection")
    if done is None:
        del options["selection"]
        o_BTHV, lse_BTH = call.attend.forward(q_BTHK, k_BTGK, v_BTGV, sel_BTH, **options)
    else:
        _, o_BTHV, lse_BTH = done
    o_BTHV = checkpoint_name(o_BTHV, "attention_out")
    lse_BTH = checkpoint_name(lse_BTH, "attention_lse")
    return o_BTHV, (q_BTHK, k_BTGK, v_BTGV, o_BTHV, lse_BTH, sel_BTH)


def _backward(call: Call, saved: tuple, do_BTHV: Array) -> tuple[Array, Array, Array]:
    return call.attend.backward(*saved, do_BTHV, chunk_size=call.chunk_size, scale=call.scale)


_attention.defvjp(_forward, _backward)
