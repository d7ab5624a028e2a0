"""Gated DeltaNet: the delta rule with a decaying state and an output gate.

    g = -exp(A_log) softplus(x W_a + dt_bias)  per head
    S_t = e^{g_t} S_{t-1} + k_t (x) beta_t (v_t - k_t^T e^{g_t} S_{t-1});  y_t = RMSNorm(q_t^T S_t) * silu(x W_g)

Yang et al., arXiv 2412.06464; public implementation: flash-linear-attention, `fla/layers/gated_deltanet.py`. At 768 x
12: 6 heads with keys of 96 and values of 192, SwiGLU of 2048, RMSNorm with eps 1e-6; 123.9M parameters, tied. See
`_delta.py`.

With `value_heads`, several value heads share the queries and keys of a head, as in Qwen3-Next (transformers,
`models/qwen3_next`).
"""

from flax import nnx

from seqjax.mixers._delta import GatedDeltaMixer


class GatedDeltaNet(GatedDeltaMixer):
    """The delta rule with decay and output gate."""

    resets = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        value_heads: int | None = None,  # a multiple of heads, each with a beta, decay and state; None = heads
        key_dim: int | None = None,  # summed over heads; None = 3/4 of the model width
        value_dim: int | None = None,  # summed over heads; None = twice key_dim
        gate: bool = True,  # output gate
        conv_width: int = 4,
        conv: bool = True,  # False removes the convolutions; SiLU and the norm of q and k remain
        norm_eps: float = 1e-6,
        chunk_size: int = 64,  # tokens per chunk; affects the speed, not the result
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        key_dim, value_dim = self.widths(dim, key_dim, value_dim)
        super().__init__(
            dim,
            heads=heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            gate=gate,
            conv_width=conv_width,
            conv=conv,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
            implementation=implementation,
            rngs=rngs,
        )

    @staticmethod
    def widths(dim: int, key_dim: int | None, value_dim: int | None) -> tuple[int, int]:
        """Return the key and value widths, summed over heads, at model width `dim`."""
        key_dim = 3 * dim // 4 if key_dim is None else key_dim
        return key_dim, 2 * key_dim if value_dim is None else value_dim
