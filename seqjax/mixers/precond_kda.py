"""Preconditioned KDA: Kimi Delta Attention with keys scaled by their curvature when written.

    S <- diag(e^{g_t}) S_{t-1};  S_t = S + (M_t * k_t) (x) beta_t (v_t - k_t^T S)
    y_t = RMSNorm(q_t^T S_t) * sigmoid((x G_1) G_2 + b)

M comes from a sum of squared keys with one decay per head (`_precond.py`). arXiv 2604.21100; public implementation:
flash-linear-attention, `fla/layers/precond_kda.py`. At 768 x 12: 12 heads of 64, SwiGLU of 2048, RMSNorm with eps 1e-6;
112.4M parameters, tied. All other parts are KDA's.
"""

from flax import nnx

import kernels_pallas
from seqjax.mixers._precond import Preconditioner, PrecondMixer
from seqjax.mixers.kda import KDA
from seqjax.nn.layers import project_float32
from seqjax.types import Array


class PrecondKDA(PrecondMixer, KDA):
    """KDA with preconditioned keys."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,  # summed over heads; None = model width
        value_dim: int | None = None,  # summed over heads; None = model width
        precond_bound: float = 1.5,  # largest factor of a written key, 1 to 2; the smallest is 1 / precond_bound
        lower_bound: float | None = None,  # of a token's log decay, below 0 (published: -5); None = unbounded
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
            lower_bound=lower_bound,
            gate=gate,
            conv_width=conv_width,
            conv=conv,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
            implementation=implementation,
            rngs=rngs,
        )
        self.precond = Preconditioner(dim, heads=heads, bound=precond_bound, slowest=1.0, rngs=rngs)

    def _log_decay(self, x_BTD: Array) -> Array:
        """Return the log decay, float32 [B, T, H, K]."""
        step_BTE = project_float32(self.decay_out, self.decay_in(x_BTD))
        step_BTHK = step_BTE.reshape(*step_BTE.shape[:-1], self.heads, -1)
        return kernels_pallas.kda_log_decay(step_BTHK, **self._decay)
