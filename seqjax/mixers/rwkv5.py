"""RWKV-5 "Eagle": linear attention with a constant decay per channel.

    x_i = x_t + mu_i * (x_{t-1} - x_t)  for i in r, k, v, g;  r, k, v = x_r W_r, x_k W_k, x_v W_v;  g = silu(x_g W_g)
    y_t = r_t (S_{t-1} + diag(u) k_t^T v_t),   S_t = diag(w) S_{t-1} + k_t^T v_t,   w = exp(-exp(omega))
    out = (GroupNorm_H(y) * g) W_o                                                        S [N, N] per head

Peng et al., arXiv 2404.05892; public implementation RWKV-LM v5.2. omega is a parameter. The decay, the state and the
norm are float32. The public files store 1 - mu. The eps of GroupNorm is 64e-5, which equals the public training code's
y / 8 with eps 1e-5.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._rwkv import GroupNorm, RwkvBlock, depth, group_norm_gain, lerps, ramp
from seqjax.nn.initializers import constant, orthogonal, values
from seqjax.nn.layers import Linear
from seqjax.nn.params import param
from seqjax.ops.linear_attention import CHUNK, wkv6
from seqjax.types import Array, Layer


class RwkvCache(NamedTuple):
    """The previous token's input, and the float32 state."""

    last_BD: Array
    state_BHKV: Array


def omega_init(dim: int, layer: Layer) -> Any:
    """Return omega's initialiser: slow to fast decays over the channels.

    The range is steeper in deep layers.
    """
    n_D = jnp.arange(dim) / (dim - 1)
    return values(-6 + 5 * n_D ** (0.7 + 1.3 * depth(layer)[0]))


def bonus_init(dim: int, layer: Layer) -> Any:
    """Return the initialiser of u, the bonus for the current token."""
    n_D = jnp.arange(dim)
    return values(depth(layer)[0] * (1 - n_D / (dim - 1)) + 0.1 * ((n_D + 1) % 3 - 1))


class Block(RwkvBlock):
    """The RWKV block with ChannelMix v5."""

    version = 5


class RWKV5(base.RecurrentMixer):
    """The time mix; RWKV-6 overrides the token shift and the decay."""

    resets = True

    block = Block

    def __init__(
        self,
        dim: int,
        *,
        head_dim: int = 64,
        chunk_size: int = CHUNK,  # tokens per chunk; affects the speed, not the result
        implementation: str | None = None,
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        if head_dim < 1 or dim % head_dim:
            raise UserError(f"head_dim={head_dim} must divide {base.size(dim=dim)}.")
        base.at_least(1, chunk_size=chunk_size)
        self.dim, self.heads, self.head_dim = dim, dim // head_dim, head_dim
        self.chunk_size, self.implementation = chunk_size, implementation

        def square(init: Any, axes: tuple[str, str] = ("embed", "heads")) -> Linear:
            return Linear(dim, dim, axes=axes, init=init, rngs=rngs)

        self.r, self.k, self.v = square(orthogonal()), square(orthogonal(0.1)), square(orthogonal())
        self.g = square(orthogonal(0.1))
        self.out = square(constant(0.0), ("heads", "embed"))
        self.omega = param(rngs, omega_init(dim, layer), (dim,), ("heads",))
        self.u = param(rngs, bonus_init(dim, layer), (dim,), ("heads",))
        self.norm = GroupNorm(self.heads, head_dim, gain=group_norm_gain(layer), rngs=rngs)
        self._init_token_shift(layer, rngs)

    def _init_token_shift(self, layer: Layer, rngs: nnx.Rngs) -> None:
        rho, kappa = depth(layer)
        slow_D, fast_D = ramp(self.dim, kappa), ramp(self.dim, kappa / 2)
        # Row order: r, k, v, g.
        mu_PD = jnp.stack([1 - x_D for x_D in (fast_D, slow_D, slow_D + 0.3 * rho, fast_D)])
        self.mu = param(rngs, values(mu_PD), mu_PD.shape, ("state", "embed"))

    def _shifted_inputs(
        self, x_BTD: Array, last_BD: Array, segments: Array | None
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Return the inputs of r, k, v, g, and the log decay (here [1, 1, D]).

        `last_BD` precedes the first token; `segments` is as in `lerps`.
        """
        r_BTD, k_BTD, v_BTD, g_BTD = lerps(x_BTD, last_BD, tuple(self.mu[...]), segments=segments)
        return r_BTD, k_BTD, v_BTD, g_BTD, -jnp.exp(self.omega[...])[None, None]

    def prefill(self, x_BTD: Array, cache: RwkvCache, segments: Array | None = None) -> tuple[Array, RwkvCache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        r_BTD, k_BTD, v_BTD, g_BTD, log_w_BTD = self._shifted_inputs(x_BTD, cache.last_BD, segments)

        def split_heads(x: Array) -> Array:
            return x.reshape(*x.shape[:2], self.heads, self.head_dim)

        y_BTHV, state_BHKV = wkv6(
            split_heads(self.r(r_BTD)),
            split_heads(self.k(k_BTD)),
            split_heads(self.v(v_BTD)),
            split_heads(log_w_BTD),
            self.u[...].reshape(self.heads, -1),
            initial_state=cache.state_BHKV,
            return_state=True,
            segments=segments,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        y_BTD = self.norm(y_BTHV, self.g(g_BTD), activation="silu")
        return self.out(y_BTD), RwkvCache(x_BTD[:, -1].astype(cache.last_BD.dtype), state_BHKV)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> RwkvCache:
        """Return an empty cache."""
        del max_len
        state_BHKV = jnp.zeros((batch, self.heads, self.head_dim, self.head_dim), jnp.float32)
        return RwkvCache(jnp.zeros((batch, self.dim), dtype), state_BHKV)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token of the chunked recurrence.

        Counts the scores and their product with v over half a chunk, the state update and the state read.
        """
        chunk = min(self.chunk_size, seq_len)
        return 2 * self.dim * (chunk + 1) + 4 * self.dim * self.head_dim
