"""RWKV-7: a matrix state with a decay per channel and partial value removal.

    x_i = x_t + mu_i * (x_{t-1} - x_t)  for i in r, w, k, v, a, g;   r, k, v = x_r W_r, x_k W_k, x_v W_v
    lw = -e^{-1/2} sigmoid(w0 + tanh(x_w w1) w2);   eta = sigmoid(a0 + (x_a a1) a2);   g = sigmoid(x_g g1) g2
    v' = v + (v_first - v) * sigmoid(v0 + (x_v v1) v2);   v' = v in the first layer, which defines v_first = v
    kappa = k * k_k, divided by its norm per head;   k' = k * (1 + (eta - 1) * k_a)
    S_t = diag(e^{lw}) S_{t-1} - (kappa * eta) (kappa^T S_{t-1}) + k' v'^T;   y = S_t^T r      per head, S_t [K, V]
    out = ((GroupNorm(y) + s v') * g) W_o,   s = sum over the head's channels of r * k' * r_k

`*` is elementwise. (kappa * eta) (kappa^T S_{t-1}) and k' v'^T are outer products; `ops/wkv7.py` computes the
recurrence with a = -kappa and b = kappa * eta. In a hybrid, the first layer is the model's first layer with the mixer
rwkv7 or rwkv7_shell.

Peng et al., arXiv 2503.14456; public implementation BlinkDL/RWKV-LM, RWKV-v7. Ranks as published: 64 (w, a), 32 (v) and
128 (g) at width 768. A model with width 768 and 12 layers has 114.9M parameters tied and 139.5M untied. This excludes
the first layer's unused v-LoRA (49,920), which exists because all layers share one structure. Deviation: a tied
embedding is initialised as N(0, 0.02^2) instead of U(+-1e-4).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import kernels_pallas
from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._rwkv import GroupNorm, depth, group_norm_gain
from seqjax.mixers._rwkv7 import Block, Lora, TimeMix, TokenShift, ValueResidual, centred, first_values, rank
from seqjax.mixers._rwkv7 import gate_rank as published_gate_rank
from seqjax.mixers._rwkv7 import value_rank as published_value_rank
from seqjax.nn.initializers import constant, orthogonal, values
from seqjax.nn.layers import Linear
from seqjax.nn.params import param
from seqjax.ops.wkv7 import wkv7
from seqjax.types import Array, Layer


def lora_ranks(
    dim: int,
    *,
    decay_rank: int | None = None,
    eta_rank: int | None = None,
    value_rank: int | None = None,
    gate_rank: int | None = None,
) -> tuple[int, int, int, int]:
    """Return the ranks of w, a, v and g.

    The defaults are the published ones: 64, 64, 32 and 128 at width 768.
    """
    return (
        decay_rank or rank(dim, 1.8, 0.5),
        eta_rank or rank(dim, 1.8, 0.5),
        value_rank or published_value_rank(dim),
        gate_rank or published_gate_rank(dim),
    )


class Rwkv7Cache(NamedTuple):
    """The float32 state, key index first, and the previous token's input."""

    s_BHKV: Array
    last_BD: Array


class RWKV7(TimeMix):
    """The time mix of RWKV-7.

    Outside a model it acts as a first layer. The value residual (`v_lora`) then has no effect and gets no gradient.
    """

    block = Block
    resets = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        decay_rank: int | None = None,  # for all ranks: None = as published for the model width
        eta_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        chunk_size: int = 64,  # tokens per chunk; affects the speed, not the result
        implementation: str | None = None,  # recurrence backend; None = automatic, always for the other kernels
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        if heads < 1 or dim % heads:
            raise UserError(f"heads={heads} does not divide {base.size(dim=dim)}; choose heads that do.")
        ranks = {"decay_rank": decay_rank, "eta_rank": eta_rank, "value_rank": value_rank, "gate_rank": gate_rank}
        base.at_least(1, **ranks)
        if not 1 <= chunk_size <= 128:
            raise UserError(
                f"chunk_size={chunk_size} must be 1 to 128: the decay over a longer chunk does not fit float32."
            )
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads
        self.chunk_size, self.implementation = chunk_size, implementation
        depth_ratio = depth(layer)[0]  # l / (L - 1) for layer l of L
        # The constants in the initial w0, a0, k_k, k_a and r_k are from RWKV-LM, RWKV-v7/train_temp/src/model.py.
        linear_D = centred(dim)
        position_D = (jnp.arange(dim) % self.head_dim) * 2 / max(1, self.head_dim - 1) - 1
        zigzag_D = position_D * jnp.abs(position_D)
        decay_D = -6 + 6 * (linear_D + 0.5) ** (1 + depth_ratio**0.3) + 0.5 + 2.5 * zigzag_D
        n_w, n_a, n_v, n_g = lora_ranks(dim, **ranks)

        def linear(scale: float) -> Linear:
            return Linear(dim, dim, axes=("embed", "heads"), init=orthogonal(scale), rngs=rngs)

        def vector(x: Any) -> nnx.Param:
            return param(rngs, values(x), (dim,), ("heads",))

        self.mu = TokenShift("rwkvag", dim, layer, rngs=rngs)
        self.r, self.k, self.v = linear(1.0), linear(0.1), linear(1.0)
        self.w_lora = Lora(dim, n_w, bias=decay_D, activation=jnp.tanh, rngs=rngs)
        self.a_lora = Lora(dim, n_a, bias=-0.19 + 0.3 * zigzag_D + 0.4 * linear_D, rngs=rngs)
        self.v_lora = ValueResidual(dim, n_v, rngs=rngs)
        self.g_lora = Lora(dim, n_g, activation=jax.nn.sigmoid, rngs=rngs)
        self.k_k, self.k_a, self.r_k = vector(0.71 - 0.1 * linear_D), vector(1.02), vector(-0.04)
        self.norm = GroupNorm(heads, self.head_dim, gain=group_norm_gain(layer), rngs=rngs)
        self.out = Linear(dim, dim, axes=("heads", "embed"), init=constant(0.0), rngs=rngs)

    def time_mix(
        self,
        x_BTD: Array,
        cache: Any,
        *,
        v_first_BTD: Array | None = None,
        layer: Array | int = 0,
        continues: bool = False,
        segments: Array | None = None,
    ) -> tuple[Array, Array, Any]:
        """Return the output, the first layer's values [B, T, D] and the cache.

        `layer` counts from the model's first RWKV-7 block; layer 0 ignores `v_first_BTD` and returns its own values.
        `cache` is None in training.
        """
        del continues  # an empty cache is the initial state (zeros), so a prompt is processed like a continuation
        x = self.mu(x_BTD, None if cache is None else cache.last_BD, segments)
        r_BTHK, k_BTHK, own_v_BTHV = (self._split_heads(y) for y in (self.r(x["r"]), self.k(x["k"]), self.v(x["v"])))
        mix = None
        if v_first_BTD is not None:
            v_first_BTHV, is_first = self._split_heads(v_first_BTD), jnp.asarray(layer == 0)
            mix = kernels_pallas.ValueMix(v_first_BTHV, self.v_lora.factors(x["v"]), is_first)
        core = kernels_pallas.wkv7_operands(
            r_BTHK,
            k_BTHK,
            own_v_BTHV,
            decay=self.w_lora.factors(x["w"]),
            eta=self.a_lora.factors(x["a"]),
            k_k_D=self.k_k[...],
            k_a_D=self.k_a[...],
            r_k_D=self.r_k[...],
            mix=mix,
        )
        result: Any = wkv7(
            core.r_BTHK,
            core.k_BTHK,
            core.v_BTHK,
            core.log_w_BTHK,
            core.a_BTHK,
            core.b_BTHK,
            initial_state=None if cache is None else cache.s_BHKV,
            return_state=True,
            segments=segments,
            min_log_w=-math.exp(-0.5),
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        o_BTHV, s_BHKV = result
        y_BTD = self.norm(o_BTHV, self.g_lora(x["g"], dtype=x_BTD.dtype), core.skip)
        if cache is not None:
            cache = Rwkv7Cache(s_BHKV, x_BTD[:, -1].astype(cache.last_BD.dtype))
        first_BTD = None if core.first_BTHK is None else core.first_BTHK.reshape(x_BTD.shape)
        return self.out(y_BTD), first_values(own_v_BTHV.reshape(x_BTD.shape), first_BTD, layer), cache

    def _split_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.heads, self.head_dim)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Rwkv7Cache:
        """Return an empty cache; it does not depend on `max_len`."""
        del max_len
        shape = (batch, self.heads, self.head_dim, self.head_dim)
        return Rwkv7Cache(jnp.zeros(shape, jnp.float32), jnp.zeros((batch, self.dim), dtype))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of the recurrence per token, 9 per state entry.

        Counts decay, a^T S, two rank-one updates and r^T S.
        """
        del seq_len
        return 9 * self.dim * self.head_dim
