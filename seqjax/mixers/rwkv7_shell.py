"""RWKV-7's block with another way of looking back: softmax attention, a window, or Top-1 Chunk.

    q = lerp(x; mu_r) W_r;  k = lerp(x; mu_k) W_k;  v = lerp(x; mu_v) W_v, moved to the first layer's as in RWKV-7
    o = core(rope(q), rope(k), v);   out = (GroupNorm(o) * sigmoid(lerp(x; mu_g) g1) g2) W_o

arXiv 2505.18522, the experiments at 100k tokens: only the sequence modelling of RWKV-7 is replaced. What belongs to its
recurrence goes: decay and eta, k_k, k_a and the bonus. Shift, value residual, gate and GroupNorm stay, and can be
switched off: 137.1M parameters untied with all (without the first layer's v-LoRA, which it does not use), 134.1M with
none. W_k starts orthogonal with scale 1, not RWKV's 0.1, which would leave softmax uniform; queries and keys are
normalised for Top-1 only. ChannelMix keeps its own token shift.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError, nearest
from seqjax.mixers import _rwkv as common
from seqjax.mixers import rwkv7, top1_chunk, transformer_pp
from seqjax.nn.layers import Linear, constant
from seqjax.types import Array, LayerSpec

CORES = ("full", "window", "top1_exact", "top1_approx")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShellConfig:
    """Which parts of RWKV-7's time mix stay around the core."""

    shift: bool = True
    vres: bool = True
    gate: bool = True
    lnx: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`core` is full, window, top1_exact or top1_approx; `window` and `select_chunk` serve those that have them."""

    name: str
    heads: int
    core: str = "top1_exact"
    window: int = 256
    select_chunk: int = 128
    rope_base: float = 1e6
    value_rank: int = 0
    gate_rank: int = 0
    key_init: float = 1.0
    shell: ShellConfig = ShellConfig()
    implementation: str | None = None

    def core_config(self) -> Any:
        """The attention mixer that does the looking back."""
        if self.core not in CORES:
            raise UserError(f"config.model.mixer.core={self.core!r} is not known.{nearest(self.core, CORES)}")
        shared: dict[str, Any] = {
            "heads": self.heads,
            "rope_base": self.rope_base,
            "implementation": self.implementation,
        }
        if self.core.startswith("top1"):
            selection = self.core.removeprefix("top1_")
            return top1_chunk.Config(name="top1_chunk", chunk_size=self.select_chunk, selection=selection, **shared)
        window = self.window if self.core == "window" else 0
        return transformer_pp.Config(name="transformer_pp", window=window, **shared)

    def check(self, *, dim: int, seq_len: int) -> None:
        """Raise `UserError` where these settings do not fit the model."""
        if self.core == "window" and self.window < 1:
            raise UserError(f"config.model.mixer.window={self.window}: give the keys a query sees, or core=full.")
        if self.core.startswith("top1") and not 1 <= self.select_chunk <= seq_len:
            raise UserError(
                f"config.model.mixer.select_chunk={self.select_chunk} must be 1 to config.train.seq_len={seq_len}."
            )
        self.core_config().check(dim=dim, seq_len=seq_len)


class ShellCache(NamedTuple):
    """The core's keys and values, and the token before."""

    core: Any
    last_BD: Array


class Mixer(nnx.Module):
    """The time mix; the core is an attention mixer whose projections start as RWKV's do."""

    def __init__(self, config: Any, spec: LayerSpec, *, rngs: nnx.Rngs):
        self.dim, dim, shell = spec.dim, spec.dim, config.shell
        core_config = config.core_config()
        module: Any = top1_chunk if core_config.name == "top1_chunk" else transformer_pp
        self.core = module.Mixer(core_config, spec, rngs=rngs)
        self.heads, self.head_dim = config.heads, self.core.head_dim

        def linear(scale: float) -> Linear:
            return Linear(dim, dim, axes=("embed", "heads"), init=common.orthogonal(scale), rngs=rngs)

        self.core.q, self.core.k, self.core.v = linear(1.0), linear(config.key_init), linear(1.0)
        self.core.out = Linear(dim, dim, axes=("heads", "embed"), init=constant(0.0), rngs=rngs)
        self.mu = rwkv7.Shift("rkvg" if shell.gate else "rkv", spec, rngs=rngs) if shell.shift else None
        value_rank = config.value_rank or rwkv7.rank(dim, 1.3, 0.5)
        gate_rank = config.gate_rank or rwkv7.rank(dim, 0.6, 0.8)
        value_bias = 0.73 - 0.4 * rwkv7.centred(dim)
        self.v_lora = rwkv7.Lora(dim, value_rank, bias=value_bias, rngs=rngs) if shell.vres else None
        self.g_lora = rwkv7.Lora(dim, gate_rank, activation=jax.nn.sigmoid, rngs=rngs) if shell.gate else None
        gain = common.head_norm_gain(spec)
        self.norm = common.HeadNorm(config.heads, self.head_dim, gain=gain, rngs=rngs) if shell.lnx else None

    def mix(
        self, x_BTD: Array, v_first: Array | None, is_first: Array | None, cache: ShellCache | None
    ) -> tuple[Array, Array, ShellCache | None]:
        """Output, this layer's own values and the cache; with a cache, one token at any length or a first prompt."""
        x = dict.fromkeys("rkvg", x_BTD)
        if self.mu is not None:
            x |= self.mu(x_BTD, None if cache is None else cache.last_BD)
        q, k, v = self.core.q(x["r"]), self.core.k(x["k"]), self.core.v(x["v"])
        own_v = v
        if self.v_lora is not None and v_first is not None and is_first is not None:
            share = jax.nn.sigmoid(self.v_lora(x["v"]))
            moved = v + (v_first.astype(jnp.float32) - v) * share
            v = jnp.where(is_first, v, moved.astype(v.dtype))
        o_BTHK, seen = self._look_back(q, k, v, None if cache is None else cache.core)
        if cache is not None:
            cache = ShellCache(seen, x_BTD[:, -1].astype(cache.last_BD.dtype))
        y = o_BTHK.reshape(x_BTD.shape) if self.norm is None else self.norm(o_BTHK)
        y = y if self.g_lora is None else y * self.g_lora(x["g"])
        return self.core.out(y.astype(x_BTD.dtype)), own_v, cache

    def _look_back(self, q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        seq_len = q.shape[1]
        if cache is None or seq_len > 1:
            q, k, v = self.core.split_heads(q, k, v, jnp.arange(seq_len), seq_len)
            return self.core.attend(q, k, v), None if cache is None else self.core.extend(cache, k, v)
        # a ring buffer outlives its own length, so the rotary table must not end with it
        max_len = 2**20 if self.core.window else cache.k_BSGK.shape[1]
        q, k, v = self.core.split_heads(q, k, v, cache.length[None], max_len)
        cache = self.core.extend(cache, k, v)
        return self.core.attend_step(q[:, 0], cache)[:, None], cache

    def __call__(self, x_BTD: Array) -> Array:
        """A first layer over a whole sequence."""
        return self.mix(x_BTD, None, None, None)[0]

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> ShellCache:
        """The core's empty cache, and no token before."""
        return ShellCache(self.core.init_cache(batch, max_len, dtype), jnp.zeros((batch, self.dim), dtype))

    def step(self, x_BD: Array, cache: Any) -> tuple[Array, Any]:
        """One token of a first layer."""
        y_BTD, _, cache = self.mix(x_BD[:, None], None, None, cache)
        return y_BTD[:, 0], cache

    def flops_per_token(self, seq_len: int) -> float:
        """The core's."""
        return self.core.flops_per_token(seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """The core's: a selection has no backward."""
        own = getattr(self.core, "train_flops_per_token", None)
        return own(seq_len) if own else 3 * self.core.flops_per_token(seq_len)

    def state_size(self, seq_len: int) -> int:
        """The core's and the token before; ChannelMix keeps another."""
        return self.core.state_size(seq_len) + self.dim

    def entropy(self, x_BTD: Array) -> Array | None:
        """Entropy of the core's weights in nats, float32 [B, T, H]; None for the Top-1 cores."""
        if not hasattr(self.core, "entropy_of"):
            return None
        x = dict.fromkeys("rk", x_BTD) if self.mu is None else self.mu(x_BTD, None)
        seq_len, k = x_BTD.shape[1], self.core.k(x["k"])
        q, k, _ = self.core.split_heads(self.core.q(x["r"]), k, k, jnp.arange(seq_len), seq_len)
        return self.core.entropy_of(q, k)


class Block(rwkv7.Block):
    """RWKV-7's, around another time mix."""

    def entropy(self, x_BTD: Array, *, dtype: Any) -> Array | None:
        """As `seqjax.models.block.Block.entropy`."""
        return self.mixer.entropy(self.norm1(x_BTD).astype(dtype))

    def train_flops_per_token(self, seq_len: int) -> float:
        """Forward and backward, beside the products with parameters."""
        return self.mixer.train_flops_per_token(seq_len)
