"""The `xla` backend of the selective scan: chunks side by side, tokens of a chunk one after the other. See `vjp.py`.

A differs per channel and state, so there is no matrix form. Time is cut into chunks of `chunk_size`, and groups of
`GROUP` chunks. With g the running sum of dt inside a chunk, a chunk adds sum_s exp(A (g_end - g_s)) dt_s x_s B_s^T to
the state: one fused reduction per chunk, from which the states at the chunk starts follow. Then all chunks of a group
walk their tokens side by side.

The backward pass makes the states of one group again from the one at its start and walks the tokens backward with the
state's gradient, likewise known at every chunk's end by a reduction. The largest array holds the states of one group:
B x GROUP x C x E x N.
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import vary_alike
from kernels_pallas.chunks import cut, join
from kernels_pallas.state_scan.xla import elementwise as carry_states

CHUNK = 32
GROUP = 16  # chunks that are worked on side by side


def forward(x, dt, a_EN, b, c, d_E, initial, *, chunk_size: int | None, keep: bool) -> tuple[Array, Array, Array]:
    """(y [B, T, E], the last state, the states at the starts of the groups)."""
    del keep  # what nobody reads XLA does not write
    acc, seq_len, skip = dt.dtype, x.shape[1], x
    chunk = min(chunk_size or CHUNK, seq_len)

    def group(h, xs):
        x, dt, b, c = (t.astype(acc) for t in xs)
        starts, end = _starts(h, x, dt, a_EN, b)

        def token(h, xs):
            x, dt, b, c = xs
            h = _advance(h, x, dt, a_EN, b)
            return h, jnp.sum(h * c[..., None, :], axis=-1)

        _, y = jax.lax.scan(token, starts, (x, dt, b, c))
        return end, (y, h)

    last, (y, heads) = jax.lax.scan(group, initial, tuple(_cut(chunk, x, dt, b, c)))
    return (_join(y, seq_len) + d_E * skip).astype(skip.dtype), last, heads


def backward(x, dt, a_EN, b, c, d_E, heads, dy, d_last, *, chunk_size: int | None) -> tuple[Array, ...]:
    """The gradients of x, dt, A, B, C, D and the initial state."""
    acc, seq_len = dt.dtype, x.shape[1]
    chunk = min(chunk_size or CHUNK, seq_len)
    x32, dy32 = x.astype(acc), dy.astype(acc)

    def group(carry, xs):
        d_end, da_EN = carry
        head = xs[0]
        x, dt, b, c, dy = (t.astype(acc) for t in xs[1:])
        starts, _ = _starts(head, x, dt, a_EN, b)

        def remember(h, xs):
            x, dt, b = xs
            return _advance(h, x, dt, a_EN, b), h

        _, before = jax.lax.scan(remember, starts, (x, dt, b))
        # the gradient behind each chunk, from what later chunks of the group need
        g = jnp.cumsum(dt, axis=0)
        needed = jnp.sum(jnp.exp(g[..., None] * a_EN) * _outer(dy, c), axis=0)
        behind, d_start = carry_states(jnp.exp(g[-1][..., None] * a_EN), needed, d_end, reverse=True)

        def token(carry, xs):
            grad, da = carry
            h, x, dt, b, c, dy = xs
            grad = grad + _outer(dy, c)
            a = jnp.exp(dt[..., None] * a_EN)
            decayed = grad * a
            through = decayed * h
            dc = jnp.sum((a * h + _outer(dt * x, b)) * dy[..., None], axis=-2)
            grad_b = jnp.sum(grad * b[..., None, :], axis=-1)
            ddt = jnp.sum(through * a_EN, axis=-1) + grad_b * x
            db = jnp.sum(grad * (dt * x)[..., None], axis=-2)
            return (decayed, da + jnp.sum(through * dt[..., None], axis=(0, 1))), (grad_b * dt, ddt, db, dc)

        (_, da_EN), grads = jax.lax.scan(token, (behind, da_EN), (before, x, dt, b, c, dy), reverse=True)
        return (d_start, da_EN), grads

    xs = (heads, *_cut(chunk, x, dt, b, c, dy))
    start = vary_alike(d_last, jnp.zeros_like(a_EN))
    (d_initial, da_EN), grads = jax.lax.scan(group, start, xs, reverse=True)
    dx, ddt, db, dc = (_join(t, seq_len) for t in grads)
    dx = (dx + d_E * dy32).astype(x.dtype)
    return dx, ddt, da_EN, db.astype(b.dtype), dc.astype(c.dtype), jnp.sum(dy32 * x32, axis=(0, 1)), d_initial


def _cut(chunk: int, *arrays: Array) -> list[Array]:
    """[B, T, .] -> [groups, C, B, G, .]: scanned over groups, then over the tokens of all their chunks."""
    n_chunks = -(-arrays[0].shape[1] // chunk)
    group = min(GROUP, n_chunks)
    out = []
    for x in arrays:
        x_groups = cut(x, group * chunk)
        x_groups = x_groups.reshape(*x_groups.shape[:2], group, chunk, x.shape[-1])
        out.append(jnp.moveaxis(x_groups, (1, 3), (0, 1)))
    return out


def _join(x: Array, seq_len: int) -> Array:
    x = jnp.moveaxis(x, (0, 1), (1, 3))
    return join(x.reshape(x.shape[0], -1, *x.shape[3:]), seq_len)


def _outer(x_E: Array, b_N: Array) -> Array:
    return x_E[..., :, None] * b_N[..., None, :]


def _starts(h: Array, x: Array, dt: Array, a_EN: Array, b: Array) -> tuple[Array, Array]:
    """The states at the starts of a group's chunks [B, G, E, N], and the one after the group."""
    g = jnp.cumsum(dt, axis=0)
    update = jnp.sum(jnp.exp((g[-1] - g)[..., None] * a_EN) * _outer(dt * x, b), axis=0)
    return carry_states(jnp.exp(g[-1][..., None] * a_EN), update, h, reverse=False)


def _advance(h: Array, x: Array, dt: Array, a_EN: Array, b: Array) -> Array:
    return jnp.exp(dt[..., None] * a_EN) * h + _outer(dt * x, b)
