"""TTT-Linear: the state is a linear model that takes gradient steps on the tokens of the sequence.

    u = x W_u;  q, k = RoPE(conv4(u) + b);  v = x W_v;  lr = sigmoid(x W_r + b_r) / K per head
    f(z; W, b) = LN(z W + b),   LN with gain and bias per head;   loss = |f(k; W, b) - (v - k)|^2 / 2
    W_i = W_0 - c_i sum_{j <= i} lr_j dloss_j / dW at (W_0, b_0);  b_i likewise;  c_i = max(1 / (i + 1) + p_i, 0)
    y_i = q_i + f(q_i; W_i, b_i);   out = (LayerNorm(y) * gelu(x W_g)) W_o

i is the token's index in its mini-batch of 16, and (W_0, b_0) are the weights after the previous mini-batch. p is
learned and starts at 0. RoPE has positions i and rotates neighbouring pairs. Sun et al., arXiv 2407.04620; public
implementation: test-time-training/ttt-lm-jax, `TTTLinear` in `ttt/models/ttt_layer.py`. One projection serves q and k;
`conv=False, gate=False` is `TTTLinearBase`, with two projections and without convolutions. Convolutions are
initialised as in ttt-lm-pytorch. Not included: the public blocks first add a convolution of the normed residual stream
to the stream (`pre_conv`). At 768 x 12: 12 heads of 64, SwiGLU of 2048, RMSNorm with eps 1e-6; 110.4M parameters,
tied.

Training computes all tokens of a mini-batch in matrix products (the dual form) and scans over the mini-batches, on XLA
only. The inner model and its products are float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.nn.initializers import GPT_INIT, constant
from seqjax.nn.layers import LayerNorm, Linear, gelu_tanh, project_float32, save_inputs
from seqjax.nn.params import param
from seqjax.nn.short_conv import ShortConv, extend, init_cache
from seqjax.ops.positions import rope, rope_angles
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array

ROPE_BASE = 10_000.0


class TTTCache(NamedTuple):
    """The inner model, the gradient sums of the current mini-batch, the last projections, and the length.

    `w_BHKK` and `b_BH1K` are changes since the start of the sequence, up to the last complete mini-batch. The gradients
    are weighted by the learning rates. All four are float32.
    """

    w_BHKK: Array
    b_BH1K: Array
    dw_BHKK: Array
    db_BH1K: Array
    last_BWE: Array | None
    length: Array


class TTTLinear(base.Mixer):
    """Test-time training of a linear model with LayerNorm."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        mini_batch: int = 16,  # tokens per inner gradient step; affects the result
        base_lr: float = 1.0,  # multiplies the inner learning rates
        conv: bool = True,  # False replaces the shared projection and the convolutions by projections to q and to k
        conv_width: int = 4,
        gate: bool = True,  # multiplies the normed output by gelu(x W), a gate per channel
        norm_eps: float = 1e-6,  # of the inner LayerNorm and of the LayerNorm before the gate
        rngs: nnx.Rngs,
    ):
        base.at_least(1, heads=heads, mini_batch=mini_batch, conv_width=conv_width)
        if dim % heads or dim // heads % 2:
            raise UserError(
                f"heads={heads} must divide {base.size(dim=dim)} into heads of even width, because RoPE rotates pairs; "
                "choose heads that do."
            )
        if not 0 < base_lr < float("inf"):
            raise UserError(f"base_lr={base_lr} must be positive and finite.")
        if not 0 < norm_eps < 1:
            raise UserError(f"norm_eps={norm_eps} must be between 0 and 1.")
        self.heads, self.head_dim, self.width = heads, dim // heads, dim
        self.mini_batch, self.base_lr, self.eps = mini_batch, base_lr, norm_eps
        conv_options: Any = {"width": conv_width, "bias": True, "silu": False, "axis": "heads", "rngs": rngs}
        self.q = Linear(dim, dim, axes=("embed", "heads"), rngs=rngs)  # with `conv`, of q and k
        self.k = None if conv else Linear(dim, dim, axes=("embed", "heads"), rngs=rngs)
        self.q_conv = ShortConv(dim, **conv_options) if conv else None
        self.k_conv = ShortConv(dim, **conv_options) if conv else None
        self.v = Linear(dim, dim, axes=("embed", "heads"), rngs=rngs)
        self.rate = Linear(dim, heads, axes=("embed", "heads"), bias=True, rngs=rngs)
        self.token_M = param(rngs, constant(0.0), (mini_batch,), (None,))
        self.w_HKK = param(rngs, GPT_INIT, (heads, self.head_dim, self.head_dim), ("heads", None, None))
        self.b_E = param(rngs, constant(0.0), (dim,), ("heads",))
        self.inner_norm = LayerNorm(dim, eps=norm_eps, axis="heads", rngs=rngs)  # gains and biases of all heads
        self.norm = LayerNorm(dim, eps=norm_eps, axis="heads", rngs=rngs)
        self.gate = Linear(dim, dim, axes=("embed", "heads"), rngs=rngs) if gate else None
        # As in the public models, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = Linear(dim, dim, axes=("heads", "embed"), rngs=rngs)

    def _operands(self, x_BTD: Array, cache: TTTCache) -> tuple[tuple[Array, Array, Array, Array], Array | None]:
        """Return q, k, v [B, T, H, K] and the learning rates [B, T, H, 1], and the last projections."""
        u_BTE = self.q(x_BTD)
        q_BTE, last_BWE = extend(self.q_conv, u_BTE, cache.last_BWE)
        k_BTE, _ = extend(self.k_conv, u_BTE if self.k is None else self.k(x_BTD), cache.last_BWE)
        indices_T = (cache.length + jnp.arange(x_BTD.shape[1])) % self.mini_batch
        angles = rope_angles(indices_T, head_dim=self.head_dim, base=ROPE_BASE, max_len=self.mini_batch)

        def rotated(x_BTHK: Array) -> Array:
            halves_BTHK = jnp.concatenate([x_BTHK[..., ::2], x_BTHK[..., 1::2]], axis=-1)
            return jnp.stack(jnp.split(rope(halves_BTHK, *angles), 2, axis=-1), axis=-1).reshape(x_BTHK.shape)

        q_BTHK, k_BTHK, v_BTHK = (x.reshape(*x.shape[:2], self.heads, -1) for x in (q_BTE, k_BTE, self.v(x_BTD)))
        rate_BTH = jax.nn.sigmoid(project_float32(self.rate, x_BTD)) * (self.base_lr / self.head_dim)
        return (rotated(q_BTHK), rotated(k_BTHK), v_BTHK, rate_BTH[..., None]), last_BWE

    def _token_rates(self) -> Array:
        """Return c, float32 [M, 1]."""
        return jnp.maximum(1 / jnp.arange(1, self.mini_batch + 1) + self.token_M[...], 0)[:, None]

    def _weights(self, cache: TTTCache) -> tuple[Array, Array]:
        """Return W and b at the start of the current mini-batch."""
        return self.w_HKK[...] + cache.w_BHKK, self.b_E[...].reshape(self.heads, 1, -1) + cache.b_BH1K

    def _gradients(self, k_BHMK: Array, v_BHMK: Array, rate_BHM1: Array, w_BHKK: Array, b_BH1K: Array) -> Array:
        """Return the gradients of the losses with respect to k W + b, times the learning rates."""
        gain_H1K, bias_H1K = (x[...].reshape(self.heads, 1, -1) for x in (self.inner_norm.g, self.inner_norm.b))
        unit_BHMK, scale_BHM1 = _standardized(k_BHMK @ w_BHKK + b_BH1K, self.eps)
        d_BHMK = gain_H1K * (gain_H1K * unit_BHMK + bias_H1K - (v_BHMK - k_BHMK))
        along_BHM1 = jnp.mean(d_BHMK * unit_BHMK, axis=-1, keepdims=True)
        d_BHMK = d_BHMK - jnp.mean(d_BHMK, axis=-1, keepdims=True) - unit_BHMK * along_BHM1
        return rate_BHM1 * scale_BHM1 * d_BHMK

    def _outputs(self, x_BTD: Array, q_BTHK: Array, z_BTHK: Array) -> Array:
        """Return the outputs for q W + b, `z_BTHK`."""

        @save_inputs
        def read(q_BTHK: Array, z_BTHK: Array, gain_E: Array, bias_E: Array) -> Array:
            unit_BTE = _standardized(z_BTHK, self.eps)[0].reshape(x_BTD.shape)
            return (q_BTHK.reshape(x_BTD.shape) + gain_E * unit_BTE + bias_E).astype(x_BTD.dtype)

        y_BTE = self.norm(read(q_BTHK, z_BTHK, self.inner_norm.g[...], self.inner_norm.b[...]))
        return self.out(y_BTE if self.gate is None else _gated(self.gate(x_BTD), y_BTE))

    def __call__(self, x_BTD: Array) -> Array:
        """Apply the parallel form to [B, T, D]."""
        return self.prefill(x_BTD, self.init_cache(x_BTD.shape[0], x_BTD.shape[1], x_BTD.dtype))[0]

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> TTTCache:
        """Return an empty cache; it does not depend on `max_len`."""
        del max_len
        w_BHKK = jnp.zeros((batch, self.heads, self.head_dim, self.head_dim), jnp.float32)
        b_BH1K = w_BHKK[:, :, :1]
        last_BWE = init_cache(self.q_conv, batch, dtype)
        return TTTCache(w_BHKK, b_BH1K, w_BHKK, b_BH1K, last_BWE, jnp.zeros((), jnp.int32))

    def prefill(self, x_BTD: Array, cache: TTTCache) -> tuple[Array, TTTCache]:
        """Apply the parallel form to a prompt that begins with a new mini-batch."""
        n_batch, seq_len, _ = x_BTD.shape
        size, c_M1 = self.mini_batch, self._token_rates()
        operands, last_BWE = self._operands(x_BTD, cache)

        def mini_batch(weights: tuple[Array, Array], inputs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            """Return q W + b, each token with its own weights, and the gradient sums."""
            w_BHKK, b_BH1K = weights
            q_BHMK, k_BHMK, v_BHMK, rate_BHM1 = (x.astype(jnp.float32) for x in inputs)
            d_BHMK = self._gradients(k_BHMK, v_BHMK, rate_BHM1, w_BHKK, b_BH1K)
            scores_BHMM = jnp.tril(q_BHMK @ k_BHMK.mT + 1)  # 1: b is the weight of a constant input
            z_BHMK = q_BHMK @ w_BHKK + b_BH1K - c_M1[: q_BHMK.shape[2]] * (scores_BHMM @ d_BHMK)
            return z_BHMK, (k_BHMK.mT @ d_BHMK, jnp.sum(d_BHMK, axis=2, keepdims=True))

        @functools.partial(jax.checkpoint, prevent_cse=False)  # saves only the weights of each mini-batch
        def complete(weights: tuple[Array, Array], inputs: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
            z_BHMK, (dw_BHKK, db_BH1K) = mini_batch(weights, inputs)
            return (weights[0] - c_M1[-1] * dw_BHKK, weights[1] - c_M1[-1] * db_BH1K), z_BHMK

        n, heads_first = seq_len // size, [jnp.moveaxis(time_to_heads(x), 2, 1) for x in operands]
        in_batches = [x[:, :, : n * size].reshape(*x.shape[:2], n, size, x.shape[-1]) for x in heads_first]
        with jax.default_matmul_precision("highest"):
            start = self._weights(cache)
            weights, z_nBHMK = jax.lax.scan(complete, start, tuple(jnp.moveaxis(x, 2, 0) for x in in_batches))
            z_BHTK = jnp.moveaxis(z_nBHMK, 0, 2).reshape(n_batch, self.heads, n * size, self.head_dim)
            sums = (jnp.zeros_like(weights[0]), jnp.zeros_like(weights[1]))
            if seq_len % size:
                z_BHMK, sums = mini_batch(weights, tuple(x[:, :, n * size :] for x in heads_first))
                z_BHTK = jnp.concatenate([z_BHTK, z_BHMK], axis=2)
        y_BTD = self._outputs(x_BTD, operands[0], heads_to_time(jnp.moveaxis(z_BHTK, 1, 2)))
        changes = (weights[0] - start[0] + cache.w_BHKK, weights[1] - start[1] + cache.b_BH1K)
        return y_BTD, TTTCache(*changes, *sums, last_BWE, cache.length + seq_len)

    def prefill_next(self, x_BTD: Array, cache: TTTCache) -> tuple[Array, TTTCache]:
        """Apply the parallel form if the cache ends with a complete mini-batch, otherwise step by step."""
        starts = cache.length % self.mini_batch == 0
        return jax.lax.cond(starts, self.prefill, super().prefill_next, x_BTD, cache)

    def step(self, x_BD: Array, cache: TTTCache) -> tuple[Array, TTTCache]:
        """Apply the recurrent form to one token."""
        x_BTD, c_M1, index = x_BD[:, None], self._token_rates(), cache.length % self.mini_batch
        operands, last_BWE = self._operands(x_BTD, cache)
        q_BH1K, k_BH1K, v_BH1K, rate_BH11 = (jnp.moveaxis(x, 2, 1).astype(jnp.float32) for x in operands)
        with jax.default_matmul_precision("highest"):
            w_BHKK, b_BH1K = self._weights(cache)
            d_BH1K = self._gradients(k_BH1K, v_BH1K, rate_BH11, w_BHKK, b_BH1K)
            dw_BHKK, db_BH1K = cache.dw_BHKK + k_BH1K.mT * d_BH1K, cache.db_BH1K + d_BH1K
            z_BH1K = q_BH1K @ w_BHKK + b_BH1K - c_M1[index] * (q_BH1K @ dw_BHKK + db_BH1K)
        is_last = index == self.mini_batch - 1
        step, kept = jnp.where(is_last, c_M1[-1], 0), jnp.where(is_last, 0.0, 1.0)
        w_BHKK, b_BH1K = cache.w_BHKK - step * dw_BHKK, cache.b_BH1K - step * db_BH1K
        y_BTD = self._outputs(x_BTD, operands[0], jnp.moveaxis(z_BH1K, 1, 2))
        return y_BTD[:, 0], TTTCache(w_BHKK, b_BH1K, kept * dw_BHKK, kept * db_BH1K, last_BWE, cache.length + 1)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of the update k^T d, the second product with W, the scores q k^T and their product with d.

        The first product with W is counted with the parameters.
        """
        pairs = (min(self.mini_batch, seq_len) + 1) / 2
        return 4 * self.width * (self.head_dim + pairs)


def _standardized(x: Array, eps: float) -> tuple[Array, Array]:
    """Return x with mean 0 and variance 1 over the last axis, and the factor."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale, scale


@save_inputs
def _gated(gate: Array, y: Array) -> Array:
    """Return gelu(gate) * y in the dtype of `y`."""
    return (gelu_tanh(gate) * y).astype(y.dtype)
