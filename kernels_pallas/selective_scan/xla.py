"""The `xla` backend of the selective scan: chunks in parallel, tokens sequential.

A differs per channel and state, so no matrix form exists. Time is cut into chunks of `chunk_size` and groups of GROUP
chunks. With g the running sum of dt inside a chunk, a chunk adds sum_s exp(A (g_end - g_s)) dt_s x_s B_s^T to the
state. This fused reduction gives the chunk-start states. Then all chunks of a group go over their tokens in parallel.

The backward pass recomputes a group's states from its start state. It goes back over the tokens with the state
gradient, for which a similar reduction gives the values at the chunk ends. The largest array holds the states of one
group: B x GROUP x C x E x N. A CPU has no use for this parallelism and goes token by token (`xla_cpu.py`). Equations:
`api.py`.
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import device
from kernels_pallas.backend import Backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.chunks import join_chunks, split_chunks
from kernels_pallas.selective_scan.interface import SelectiveScan
from kernels_pallas.state_scan.xla import elementwise as state_passing

CHUNK = 32
GROUP = 16  # chunks that are computed in parallel


def load() -> SelectiveScan:
    """Return this module, or on a CPU its sequential counterpart."""
    from kernels_pallas.selective_scan import xla, xla_cpu

    return xla_cpu if device.platform() == "cpu" else xla


BACKEND = Backend("xla", load)


def forward(
    x_BTE: Array,
    dt_BTE: Array,
    A_EN: Array,
    B_BTN: Array,
    C_BTN: Array,
    D_E: Array,
    initial_BEN: Array,
    *,
    chunk_size: int | None,
    keep: bool,
) -> tuple[Array, Array, Array]:
    """Return (y [B, T, E], last state, states at the group starts)."""
    del keep  # XLA drops an unused result
    acc, seq_len = dt_BTE.dtype, x_BTE.shape[1]
    chunk = min(chunk_size or CHUNK, seq_len)

    def group(h, xs):
        x, dt, b, c = (t.astype(acc) for t in xs)
        starts, end = _starts(h, x, dt, A_EN, b)

        def token(h, xs):
            x, dt, b, c = xs
            h = _advance(h, x, dt, A_EN, b)
            return h, jnp.sum(h * c[..., None, :], axis=-1)

        _, y = jax.lax.scan(token, starts, (x, dt, b, c))
        return end, (y, h)

    last_BEN, (y, kept) = jax.lax.scan(group, initial_BEN, tuple(_split(chunk, x_BTE, dt_BTE, B_BTN, C_BTN)))
    return (_join(y, seq_len) + D_E * x_BTE).astype(x_BTE.dtype), last_BEN, kept


def backward(
    x_BTE: Array,
    dt_BTE: Array,
    A_EN: Array,
    B_BTN: Array,
    C_BTN: Array,
    D_E: Array,
    kept: Array,
    dy_BTE: Array,
    d_last_BEN: Array,
    *,
    chunk_size: int | None,
) -> tuple[Array, ...]:
    """Return the gradients of x, dt, A, B, C, D and the initial state."""
    acc, seq_len = dt_BTE.dtype, x_BTE.shape[1]
    chunk = min(chunk_size or CHUNK, seq_len)
    x32_BTE, dy32_BTE = x_BTE.astype(acc), dy_BTE.astype(acc)

    def group(carry, xs):
        d_end, dA_EN = carry
        first = xs[0]
        x, dt, b, c, dy = (t.astype(acc) for t in xs[1:])
        starts, _ = _starts(first, x, dt, A_EN, b)

        def remember(h, xs):
            x, dt, b = xs
            return _advance(h, x, dt, A_EN, b), h

        _, before = jax.lax.scan(remember, starts, (x, dt, b))
        # The gradient after each chunk that comes from later chunks of the group.
        g = jnp.cumsum(dt, axis=0)
        needed = jnp.sum(jnp.exp(g[..., None] * A_EN) * _outer(dy, c), axis=0)
        d_ends, d_start = state_passing(jnp.exp(g[-1][..., None] * A_EN), needed, d_end, reverse=True)

        def token(carry, xs):
            grad, da = carry
            h, x, dt, b, c, dy = xs
            grad = grad + _outer(dy, c)
            a = jnp.exp(dt[..., None] * A_EN)
            decayed = grad * a
            through = decayed * h
            dc = jnp.sum((a * h + _outer(dt * x, b)) * dy[..., None], axis=-2)
            grad_b = jnp.sum(grad * b[..., None, :], axis=-1)
            ddt = jnp.sum(through * A_EN, axis=-1) + grad_b * x
            db = jnp.sum(grad * (dt * x)[..., None], axis=-2)
            return (decayed, da + jnp.sum(through * dt[..., None], axis=(0, 1))), (grad_b * dt, ddt, db, dc)

        (_, dA_EN), grads = jax.lax.scan(token, (d_ends, dA_EN), (before, x, dt, b, c, dy), reverse=True)
        return (d_start, dA_EN), grads

    xs = (kept, *_split(chunk, x_BTE, dt_BTE, B_BTN, C_BTN, dy_BTE))
    start = vary_alike(d_last_BEN, jnp.zeros_like(A_EN))
    (d_initial_BEN, dA_EN), grads = jax.lax.scan(group, start, xs, reverse=True)
    dx, ddt, db, dc = (_join(t, seq_len) for t in grads)
    dx = (dx + D_E * dy32_BTE).astype(x_BTE.dtype)
    dD_E = jnp.sum(dy32_BTE * x32_BTE, axis=(0, 1))
    return dx, ddt, dA_EN, db.astype(B_BTN.dtype), dc.astype(C_BTN.dtype), dD_E, d_initial_BEN


def _split(chunk: int, *arrays: Array) -> list[Array]:
    """Reshape [B, T, .] to [groups, C, B, G, .] for scans over groups, then tokens."""
    n_chunks = -(-arrays[0].shape[1] // chunk)
    group = min(GROUP, n_chunks)
    out = []
    for x in arrays:
        x_groups = split_chunks(x, group * chunk)
        x_groups = x_groups.reshape(*x_groups.shape[:2], group, chunk, x.shape[-1])
        out.append(jnp.moveaxis(x_groups, (1, 3), (0, 1)))
    return out


def _join(x: Array, seq_len: int) -> Array:
    x = jnp.moveaxis(x, (0, 1), (1, 3))
    return join_chunks(x.reshape(x.shape[0], -1, *x.shape[3:]), seq_len)


def _outer(x_E: Array, b_N: Array) -> Array:
    return x_E[..., :, None] * b_N[..., None, :]


def _starts(h: Array, x: Array, dt: Array, A_EN: Array, b: Array) -> tuple[Array, Array]:
    """Return a group's chunk-start states [B, G, E, N] and the state after it."""
    # Sum from the end: a difference of sums from the start would carry the rounding of both.
    sums = jax.lax.cumsum(dt, axis=0, reverse=True)
    after = jnp.concatenate([sums[1:], jnp.zeros_like(sums[:1])])
    update = jnp.sum(jnp.exp(after[..., None] * A_EN) * _outer(dt * x, b), axis=0)
    return state_passing(jnp.exp(sums[0][..., None] * A_EN), update, h, reverse=False)


def _advance(h: Array, x: Array, dt: Array, A_EN: Array, b: Array) -> Array:
    return jnp.exp(dt[..., None] * A_EN) * h + _outer(dt * x, b)
