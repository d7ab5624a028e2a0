"""Comba: Gated DeltaNet with a smaller predicting key and a corrected query.

    b = sigmoid(d);  q <- L2(q - D b k) / sqrt(K);  k <- L2(k)      d and D per head, of the convolved q and k
    S_t = e^{g_t} S_{t-1} + k_t (x) beta_t (v_t - b k_t^T S_{t-1});  y_t = RMSNorm(q_t^T S_t) * sigmoid(x W_g)

Hu et al., arXiv 2506.02475; public implementation: flash-linear-attention, `fla/layers/comba.py`. The prediction reads
S_{t-1} before its decay, as in fla's kernels; fla's `naive_recurrent_comba` decays first. fla's kernels also normalise
b k, so they compute b = 1 in the state's equation, as `inner_decay=False` does. At 768 x 12: 6 heads with keys of 96
and values of 192, SwiGLU of 1536, RMSNorm with eps 1e-6; 109.8M parameters, tied. Decay, beta and initial values are
Gated DeltaNet's (`_delta.py`); the recurrence is RWKV-7's (`ops/wkv7.py`) with a = -b k and keys beta k.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.mixers._delta import LowRankDeltaMixer
from seqjax.mixers.gated_deltanet import GatedDeltaNet
from seqjax.nn.initializers import constant
from seqjax.nn.layers import l2_normalize, save_inputs
from seqjax.nn.params import param
from seqjax.types import Array


class Comba(LowRankDeltaMixer, GatedDeltaNet):
    """Gated DeltaNet with a smaller predicting key and a corrected query."""

    resets = True
    gate_activation = "sigmoid"

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,  # summed over heads; None = 3/4 of the model width
        value_dim: int | None = None,  # summed over heads; None = twice key_dim
        inner_decay: bool = True,  # learn b, the factor of the predicting key; False: b = 1
        correction: float | None = 1.0,  # initial D (fla also suggests 0.02); None: the query is not corrected
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
        # The norm follows the correction, so the convolutions return q and k without it.
        self.q_conv.l2_heads = self.k_conv.l2_heads = None
        self.q_conv.scale = 1.0
        self.inner_decay_H = param(rngs, constant(1.0), (heads,), ("heads",)) if inner_decay else None
        self.correction_H = None if correction is None else param(rngs, constant(correction), (heads,), ("heads",))

    def _inputs(self, x_BTD: Array, q_BTE: Array, k_BTE: Array, v_BTE: Array) -> tuple[Array, ...]:
        """Return the operands of the recurrence: r, k, v, log_w and a."""
        return save_inputs(self._operands)(x_BTD, q_BTE, k_BTE, v_BTE)

    def _operands(self, x_BTD: Array, *convolved: Array) -> tuple[Array, ...]:
        operands: Any = super()._inputs(x_BTD, *convolved)
        q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_g_BTH = operands
        dtype = v_BTHV.dtype
        inner_H1 = 1.0 if self.inner_decay_H is None else jax.nn.sigmoid(self.inner_decay_H[...])[:, None]
        if self.correction_H is not None:
            q_BTHK = q_BTHK - self.correction_H[...][:, None] * inner_H1 * k_BTHK  # float32, as D is
        r_BTHK, k_BTHK = l2_normalize(q_BTHK) * q_BTHK.shape[-1] ** -0.5, l2_normalize(k_BTHK)
        log_w_BTHK = jnp.broadcast_to(log_g_BTH[..., None], k_BTHK.shape)
        written_BTHK, a_BTHK = beta_BTH[..., None] * k_BTHK, -inner_H1 * k_BTHK
        return r_BTHK.astype(dtype), written_BTHK.astype(dtype), v_BTHV, log_w_BTHK, a_BTHK.astype(dtype)
