"""Log-linear Mamba-2: states for past blocks of 1, 2, 4, ... tokens.

    x, B, C, D_t, a_t, gate, norm and D as in Mamba-2 (mamba2.py)
    m_t = softplus(M * (u_t W_m))                                                 L per head, M [H, L]
    y_t = sum over levels l of m_t^(l) C_t S_t^(l) + D x_t                        S^(l) [N, V] per head
    S_t^(l) = sum over the tokens s of the level's block of a_{s+1} ... a_t D_s B_s^T x_s

t counts from 0. Level 0 is token t itself. Level l > 0 is the state of a block of 2^(l - 1) tokens before t, and exists
if bit l - 1 of t is set. A sequence thus has up to log2 T + 1 states, and recent tokens are in small blocks. Levels
from L - 1 on share one state and one weight. Guo et al., arXiv 2506.04761 (Log-Linear Attention); public
implementation: flash-linear-attention, `fla/layers/log_linear_mamba2.py`. As in the public code, M starts at 1. The
public code has 15 levels; the default here is 12, enough for 2,048 tokens. At 768 x 24 (Mamba-2's layers have no MLP):
120.3M parameters, tied.

Tokens that continue a cached sequence are processed one by one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.mixers import base
from seqjax.mixers.mamba2 import Mamba2
from seqjax.nn.initializers import constant, uniform
from seqjax.nn.layers import Linear, project_float32
from seqjax.nn.params import param
from seqjax.ops.log_linear import CHUNK, log_linear, log_linear_states, log_linear_step
from seqjax.types import Array, Layer


class LogLinearCache(NamedTuple):
    """The convolutions' last inputs, the states of levels 1, 2, ..., and the length.

    The states are float32.
    """

    x_BWE: Array
    bc_BWN: Array
    states_BLHNV: Array
    length: Array


class LogLinearMamba2(Mamba2):
    """Mamba-2 with one state per block of a Fenwick tree."""

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,  # inner width / model width
        head_dim: int = 64,
        state: int = 128,
        conv_width: int = 4,
        levels: int = 12,  # weights per head; blocks of 2^(levels - 2) tokens or more share a weight and a state
        chunk_size: int = CHUNK,  # tokens per chunk, rounded down to a power of two; affects only the speed
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        base.at_least(2, levels=levels)
        super().__init__(
            dim,
            expand=expand,
            head_dim=head_dim,
            state=state,
            conv_width=conv_width,
            chunk_size=chunk_size,
            layer=layer,
            rngs=rngs,
        )
        self.levels = levels
        init = uniform(dim**-0.5)
        self.level = Linear(dim, self.heads * levels, axes=("embed", "heads"), init=init, rngs=rngs)
        self.level_scale = param(rngs, constant(1.0), (self.heads, levels), ("heads", None), group="vector")

    def _operands(self, u_BTD: Array, x_BTHV: Array, dt_BTH: Array) -> tuple[Array, Array, Array]:
        """Return x times step sizes, the log decay and the level weights [B, T, H, L]."""
        levels_BTHL = project_float32(self.level, u_BTD).reshape(*dt_BTH.shape, self.levels)
        m_BTHL = jax.nn.softplus(self.level_scale[...] * levels_BTHL)
        return (x_BTHV * dt_BTH[..., None]).astype(x_BTHV.dtype), self.log_decay(u_BTD, dt_BTH), m_BTHL

    def prefill(self, u_BTD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the parallel form to a prompt and fill an empty cache."""
        (x_BTHV, dt_BTH, b_BTN, c_BTN), past = self.inputs(u_BTD, cache.x_BWE, cache.bc_BWN)
        scaled_BTHV, log_a_BTH, m_BTHL = self._operands(u_BTD, x_BTHV, dt_BTH)
        y_BTHV = log_linear(scaled_BTHV, log_a_BTH, b_BTN, c_BTN, m_BTHL, chunk_size=self.chunk_size)
        states = log_linear_states(scaled_BTHV, log_a_BTH, b_BTN, n_levels=cache.states_BLHNV.shape[1])
        length = cache.length + u_BTD.shape[1]
        return self.outputs(u_BTD, y_BTHV, x_BTHV), LogLinearCache(*past, states, length)

    def prefill_next(self, u_BTD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the recurrent form token by token.

        The tree's blocks are aligned to the start of the sequence, so the parallel form cannot continue from a cache.
        """
        return base.Mixer.prefill_next(self, u_BTD, cache)

    def step(self, u_BD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the recurrent form to one token."""
        u_BTD = u_BD[:, None]
        (x_BTHV, dt_BTH, b_BTN, c_BTN), past = self.inputs(u_BTD, cache.x_BWE, cache.bc_BWN)
        scaled_BTHV, log_a_BTH, m_BTHL = self._operands(u_BTD, x_BTHV, dt_BTH)
        of_token: Any = (x[:, 0] for x in (scaled_BTHV, log_a_BTH, b_BTN, c_BTN, m_BTHL))
        y_BHV, states_BLHNV = log_linear_step(*[*of_token, cache.states_BLHNV, cache.length])
        y_BTD = self.outputs(u_BTD, y_BHV[:, None], x_BTHV)
        return y_BTD[:, 0], LogLinearCache(*past, states_BLHNV, cache.length + 1)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Any:
        """Return an empty cache with all states that `max_len` tokens can have."""
        levels = min(self.levels - 1, max_len.bit_length())
        return LogLinearCache(
            jnp.zeros((batch, self.past, self.width), dtype),
            jnp.zeros((batch, self.past, 2 * self.n_state), dtype),
            jnp.zeros((batch, levels, self.heads, self.n_state, self.head_dim), jnp.float32),
            jnp.zeros((), jnp.int32),
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token of the chunked recurrence.

        Counts half a chunk as in Mamba-2, one state update, and reads of half of the other states.
        """
        chunk, n_state = min(self.chunk_size, seq_len), self.n_state
        reads = (-(-seq_len // chunk) - 1).bit_length() / 2
        return (n_state + self.width) * (chunk + 1) + 2 * self.width * n_state * (1 + reads)
