"""Post-recurrence: a norm per head, a skip connection and an output gate.

    y = (norm(x) + s a) act(g),   or, with the gate first, y = norm((x + s a) act(g)) over all channels of a token

`kernels_pallas/head_norm` has the equations, the gradient, and the XLA and Triton backends. Arithmetic is float32, with
one rounding at the end. The backward pass needs only the inputs.
"""

from jaxtyping import Float

import kernels_pallas
from seqjax.sharding import keep_time, splits_channels
from seqjax.types import Array


def head_norm(
    x_BTHV: Float[Array, "B T H V"],
    gate_BTE: Float[Array, "B T E"] | None = None,
    skip: tuple[Float[Array, "B T H V"], Float[Array, "#B #T H"]] | None = None,
    *,
    gain: Float[Array, "G"],
    bias: Float[Array, "E"] | None = None,
    activation: str = "silu",
    gate_first: bool = False,
    eps: float,
    implementation: str | None = None,
) -> Float[Array, "B T E"]:
    """Return the normalised, gated outputs, [B, T, E] in the dtype of `x_BTHV`.

    E = H V. `gain` has E entries, or V entries that the heads share. `skip` is (a, s). The other arguments are as in
    `kernels_pallas.head_norm`. A single token, as in decoding, always runs on XLA by default.
    """
    n_batch, seq_len, n_heads, n_value = x_BTHV.shape
    y_BTHV = kernels_pallas.head_norm(
        x_BTHV,
        None if gate_BTE is None else gate_BTE.reshape(x_BTHV.shape),
        skip,
        gain_HV=gain.reshape(-1, n_value),
        bias_HV=None if bias is None else bias.reshape(-1, n_value),
        activation=activation,
        gate_first=gate_first,
        eps=eps,
        is_split=splits_channels(n_heads * n_value),
        implementation="xla" if seq_len == 1 and implementation is None else implementation,
    )
    return keep_time(y_BTHV).reshape(n_batch, seq_len, -1)
