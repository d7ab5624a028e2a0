"""The base of the delta-rule mixers: short convolutions, delta rule, head norm.

    q, k, v = silu(conv4(x W));  q, k L2-normalised per head, q / sqrt(K);  beta = sigmoid(x W_b)
    S_t = S_{t-1} + k_t (x) beta_t (v_t - k_t^T S_{t-1});  y_t = RMSNorm(q_t^T S_t);  out = y W_o

Without `conv`, SiLU and the L2 norm apply to the projections directly. A subclass may decay S before the correction
(`_log_decay`) and multiply y by an output gate (`_gate`); `GatedDeltaMixer` does both for Gated DeltaNet and Gated
DeltaProduct. Beta, the decay and the state are float32, and so is the arithmetic of norms and output gate.

`LowRankDeltaMixer` has the recurrence of mixers that decay per key channel, or predict with other keys than they write.
"""

import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.nn.initializers import GPT_INIT, dt_bias, log_uniform
from seqjax.nn.layers import Linear, RMSNorm, project_float32
from seqjax.nn.params import param
from seqjax.nn.short_conv import ShortConv
from seqjax.ops.delta_rule import gated_delta_rule, gated_delta_rule_step
from seqjax.ops.head_norm import head_norm
from seqjax.ops.wkv7 import wkv7, wkv7_step
from seqjax.types import Array


class DeltaCache(NamedTuple):
    """The float32 state and the last inputs of the three convolutions."""

    s_BHKV: Array
    q_BWE: Array
    k_BWE: Array
    v_BWE: Array


class DeltaMixer(base.Mixer):
    """The delta rule without decay and gate.

    `key_dim` and `value_dim` are the widths of one update's keys and values, summed over heads. With `value_heads`, a
    multiple n of `heads`, value heads n h to n h + n - 1 read the queries and keys of head h; beta, decay, state, norm
    and gate belong to value heads. `steps` is the number of delta-rule updates per token. With several, a subclass
    overrides `_inputs`, which puts the updates on the time axis [B, T steps, H, ...], and `_recurrence`, which returns
    each token's last output (`gated_deltaproduct.py`).
    """

    gate_activation: ClassVar[str] = "silu"

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        value_heads: int | None = None,
        key_dim: int,
        value_dim: int,
        steps: int = 1,
        conv_width: int,
        conv: bool,
        norm_eps: float,
        chunk_size: int,
        implementation: str | None,
        rngs: nnx.Rngs,
    ):
        base.at_least(
            1, heads=heads, value_heads=value_heads, steps=steps, conv_width=conv_width, chunk_size=chunk_size
        )
        value_heads = heads if value_heads is None else value_heads
        if value_heads % heads:
            raise UserError(f"value_heads={value_heads} must be a multiple of heads={heads}, such as {2 * heads}.")
        base.divided(heads, key_dim=key_dim)
        base.divided(value_heads, value_dim=value_dim)
        self.heads, self.value_heads, self.steps = heads, value_heads, steps
        self.key_width, self.value_width = key_dim, value_dim
        self.chunk_size, self.implementation = chunk_size, implementation

        def linear(n_in: int, n_out: int, *axes: str) -> Linear:
            return Linear(n_in, n_out, axes=(axes[0], axes[1]), rngs=rngs)

        def short_conv(dim: int, l2_heads: int | None = None, scale: float = 1.0) -> ShortConv:
            norm: Any = {"l2_heads": l2_heads, "scale": scale}
            width = conv_width if conv else None
            return ShortConv(dim, width=width, init=GPT_INIT, axis="heads", rngs=rngs, **norm)

        self.q = linear(dim, self.key_width, "embed", "heads")
        self.k = linear(dim, steps * self.key_width, "embed", "heads")
        self.v = linear(dim, steps * self.value_width, "embed", "heads")
        self.q_conv = short_conv(self.key_width, heads, (self.key_width // heads) ** -0.5)
        self.k_conv = short_conv(steps * self.key_width, steps * heads)
        self.v_conv = short_conv(steps * self.value_width)
        self.beta = linear(dim, steps * value_heads, "embed", "heads")
        self.norm = RMSNorm(self.value_width // value_heads, eps=norm_eps, axis=None, rngs=rngs)
        # As in fla's models, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = linear(self.value_width, dim, "heads", "embed")

    def _log_decay(self, x_BTD: Array) -> Array | None:
        """Return the log decay in float32, [B, T, H] or a subclass's shape, or None."""
        del x_BTD
        return None

    def _gate(self, x_BTD: Array) -> Array | None:
        """Return the output gate before its activation, [B, T, H V], or None."""
        del x_BTD
        return None

    def _inputs(self, x_BTD: Array, q_BTE: Array, k_BTE: Array, v_BTE: Array) -> tuple[Array | None, ...]:
        """Return the operands of the recurrence: q, k, v, beta and log_g.

        The projections q, k and v are convolved, and q and k normalised, [B, T, E] with the heads' channels in E.
        """
        q_BTHK, k_BTHK, v_BTHV = (
            x.reshape(*x.shape[:2], n, -1)
            for x, n in ((q_BTE, self.heads), (k_BTE, self.heads), (v_BTE, self.value_heads))
        )
        if (shared := self.value_heads // self.heads) > 1:
            q_BTHK, k_BTHK = (jnp.repeat(x, shared, axis=2) for x in (q_BTHK, k_BTHK))
        return q_BTHK, k_BTHK, v_BTHV, jax.nn.sigmoid(project_float32(self.beta, x_BTD)), self._log_decay(x_BTD)

    def _recurrence(self, operands: Any, s_BHKV: Array | None, **segments: Array) -> tuple[Array, Array]:
        """Return the outputs [B, T, H, V] and the last state.

        `operands` is the result of `_inputs`.
        """
        result: Any = gated_delta_rule(
            *operands,
            initial_state=s_BHKV,
            return_state=True,
            **segments,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        return result

    def _recurrent_step(self, operands: Any, s_BHKV: Array) -> tuple[Array, Array]:
        """Return the outputs [B, H, V] and the state after one token.

        The operands have no time axis.
        """
        return gated_delta_rule_step(*[*operands, s_BHKV])

    def _output(self, x_BTD: Array, o_BTHV: Array) -> Array:
        """Apply norm, gate and output projection to the heads' outputs."""
        gain, eps = self.norm.g[...], self.norm.eps
        return self.out(head_norm(o_BTHV, self._gate(x_BTD), gain=gain, activation=self.gate_activation, eps=eps))

    def __call__(self, x_BTD: Array, **segments: Array) -> Array:
        """Apply the parallel form; a subclass that `resets` accepts `segments`."""
        q_BTE, k_BTE, v_BTE = (
            conv(linear(x_BTD), **segments)
            for conv, linear in ((self.q_conv, self.q), (self.k_conv, self.k), (self.v_conv, self.v))
        )
        operands = self._inputs(x_BTD, q_BTE, k_BTE, v_BTE)
        return self._output(x_BTD, self._recurrence(operands, None, **segments)[0])

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> DeltaCache:
        """Return an empty cache; it does not depend on `max_len`."""
        del max_len
        shape = (batch, self.value_heads, self.key_width // self.heads, self.value_width // self.value_heads)
        s_BHKV = jnp.zeros(shape, jnp.float32)
        return DeltaCache(s_BHKV, *(c.init_cache(batch, dtype) for c in (self.q_conv, self.k_conv, self.v_conv)))

    def _extend(self, x_BTD: Array, cache: DeltaCache) -> tuple[Any, DeltaCache]:
        q_BTE, last_q_BWE = self.q_conv.extend(self.q(x_BTD), cache.q_BWE)
        k_BTE, last_k_BWE = self.k_conv.extend(self.k(x_BTD), cache.k_BWE)
        v_BTE, last_v_BWE = self.v_conv.extend(self.v(x_BTD), cache.v_BWE)
        cache = DeltaCache(cache.s_BHKV, last_q_BWE, last_k_BWE, last_v_BWE)
        return self._inputs(x_BTD, q_BTE, k_BTE, v_BTE), cache

    def prefill(self, x_BTD: Array, cache: DeltaCache) -> tuple[Array, DeltaCache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        operands, cache = self._extend(x_BTD, cache)
        o_BTHV, s_BHKV = self._recurrence(operands, cache.s_BHKV)
        return self._output(x_BTD, o_BTHV), cache._replace(s_BHKV=s_BHKV)

    def step(self, x_BD: Array, cache: DeltaCache) -> tuple[Array, DeltaCache]:
        """Apply the recurrent form to one token."""
        x_BTD = x_BD[:, None]
        operands, cache = self._extend(x_BTD, cache)
        *earlier, last = ([None if x is None else x[:, j] for x in operands] for j in range(self.steps))
        s_BHKV = cache.s_BHKV
        for each in earlier:
            _, s_BHKV = self._recurrent_step(each, s_BHKV)
        o_BHV, s_BHKV = self._recurrent_step(last, s_BHKV)
        return self._output(x_BTD, o_BHV[:, None])[:, 0], cache._replace(s_BHKV=s_BHKV)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of the recurrence per token.

        Counts k^T S and the correction in every step, and q^T S. The chunked form performs two to three times as many
        FLOPs, on tensor cores.
        """
        del seq_len
        return (4 * self.steps + 2) * self.key_width * self.value_width / self.heads


class GatedDeltaMixer(DeltaMixer):
    """The delta rule with decay and output gate; `gate` and `decay` can disable them.

    g = -exp(A_log) softplus(x W_a + dt_bias) per head;  out = (y * silu(x W_g)) W_o
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        value_heads: int | None = None,
        key_dim: int,
        value_dim: int,
        steps: int = 1,
        decay: bool = True,
        gate: bool,
        conv_width: int,
        conv: bool,
        norm_eps: float,
        chunk_size: int,
        implementation: str | None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            dim,
            heads=heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            steps=steps,
            conv_width=conv_width,
            conv=conv,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
            implementation=implementation,
            rngs=rngs,
        )
        self.decay = Linear(dim, self.value_heads, axes=("embed", "heads"), rngs=rngs) if decay else None
        self.gate = Linear(dim, value_dim, axes=("embed", "heads"), rngs=rngs) if gate else None
        if decay:
            self.log_rate_H = param(rngs, log_uniform(0.0, 16.0), (self.value_heads,), ("heads",))
            self.step_bias_H = param(rngs, dt_bias, (self.value_heads,), ("heads",))

    def _log_decay(self, x_BTD: Array) -> Array | None:
        if self.decay is None:
            return None
        dt_BTH = jax.nn.softplus(project_float32(self.decay, x_BTD) + self.step_bias_H[...])
        return -jnp.exp(self.log_rate_H[...]) * dt_BTH

    def _gate(self, x_BTD: Array) -> Array | None:
        return None if self.gate is None else self.gate(x_BTD)


class LowRankDeltaMixer(DeltaMixer):
    """A mixer with the recurrence of RWKV-7 (`ops/wkv7.py`) instead of the delta rule's.

    Its `_inputs` returns r, k, v, log_w and a:  S_t = diag(e^{log_w}) S_{t-1} + k (x) (v + a^T S_{t-1});  y = r^T S_t
    """

    lower_bound: float | None = None  # of a token's log decay; None = unbounded

    def _recurrence(self, operands: Any, s_BHKV: Array | None, **segments: Array) -> tuple[Array, Array]:
        result: Any = wkv7(
            *[*operands, None],
            initial_state=s_BHKV,
            return_state=True,
            **segments,
            min_log_w=-math.inf if self.lower_bound is None else self.lower_bound,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        return result

    def _recurrent_step(self, operands: Any, s_BHKV: Array) -> tuple[Array, Array]:
        return wkv7_step(*[*operands, None, s_BHKV])
