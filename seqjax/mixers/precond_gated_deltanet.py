"""Preconditioned Gated DeltaNet: Gated DeltaNet with keys scaled by their curvature when written.

    S <- e^{g_t} S_{t-1};  S_t = S + (M_t * k_t) (x) beta_t (v_t - k_t^T S);  y_t = RMSNorm(q_t^T S_t) * silu(x W_g)

M comes from a decayed sum of squared keys (`_precond.py`). arXiv 2604.21100; public implementation:
flash-linear-attention, `fla/layers/precond_gated_deltanet.py`. At 768 x 12: 6 heads with keys of 96 and values of 192,
SwiGLU of 1536, RMSNorm with eps 1e-6; 109.9M parameters, tied. All other parts are Gated DeltaNet's.
"""

from flax import nnx

from seqjax.mixers._precond import Preconditioner, PrecondMixer
from seqjax.mixers.gated_deltanet import GatedDeltaNet


class PrecondGatedDeltaNet(PrecondMixer, GatedDeltaNet):
    """Gated DeltaNet with preconditioned keys."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,  # summed over heads; None = 3/4 of the model width
        value_dim: int | None = None,  # summed over heads; None = twice key_dim
        precond_bound: float = 1.5,  # largest factor of a written key, 1 to 2; the smallest is 1 / precond_bound
        gate: bool = True,  # output gate
        conv_width: int = 4,
        conv: bool = True,  # False removes the convolutions; SiLU and the norm of q and k remain
        norm_eps: float = 1e-6,
        chunk_size: int = 64,  # tokens per chunk; affects the speed, not the result
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            dim,
            heads=heads,
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
        self.precond = Preconditioner(dim, heads=heads, bound=precond_bound, slowest=0.0, rngs=rngs)
