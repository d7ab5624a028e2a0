"""DeltaNet: linear attention with a state that the delta rule corrects.

    S_t = S_{t-1} + k_t (x) beta_t (v_t - k_t^T S_{t-1}),   y_t = q_t^T S_t

Yang et al., arXiv 2406.06484; public implementation: flash-linear-attention, `fla/layers/delta_net.py`. At 768 x 12: 8
heads of 96, SwiGLU of 2048, RMSNorm with eps 1e-6; 109.7M parameters, tied. See `_delta.py`.
"""

from flax import nnx

from seqjax.mixers._delta import DeltaMixer


class DeltaNet(DeltaMixer):
    """The delta rule without decay or output gate."""

    resets = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,  # summed over heads; None = model width
        value_dim: int | None = None,  # summed over heads; None = model width
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
            key_dim=key_dim,
            value_dim=value_dim,
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
        return dim if key_dim is None else key_dim, dim if value_dim is None else value_dim
