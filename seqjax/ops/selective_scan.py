"""Selective scan: a linear recurrence with a decay per channel and state (Mamba-1), in chunks.

    h_t[e, n] = exp(dt_t[e] A[e, n]) h_{t-1}[e, n] + dt_t[e] x_t[e] B_t[n]
    y_t[e] = sum_n C_t[n] h_t[e, n] + D[e] x_t[e]

Gu and Dao, arXiv 2312.00752, algorithm 2. A differs per channel and state, so there is no matrix form. Time is cut
into chunks of `chunk_size`, and groups of `GROUP` chunks. With g the running sum of dt inside a chunk, a chunk adds
sum_s exp(A (g_end - g_s)) dt_s x_s B_s^T to the state: one fused reduction per chunk, from which the states at the
chunk starts follow. Then all chunks of a group walk their tokens side by side.

The backward pass keeps the inputs and the states at the starts of the groups. It makes the states of one group again
and walks the tokens backward with the state's gradient L (likewise known at every chunk's end by a reduction):

    L += dy_t C_t^T;  dC_t = dy_t h_t;  ddt_t = sum_n L (h_{t-1} a_t A + x_t B_t);  dA += L h_{t-1} a_t dt_t
    dB_t = sum_e L dt_t x_t;  dx_t = sum_n L dt_t B_t;  L <- L a_t            with a_t = exp(dt_t A)

dt, A, decays and states are float32. The largest array holds the states of one group: B x GROUP x C x E x N.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from seqjax.ops._chunks import accumulator, carry_states, cut
from seqjax.types import Array

CHUNK = 32
GROUP = 16  # chunks that are worked on side by side


def selective_scan(
    x_BTE: Float[Array, "B T E"],
    dt_BTE: Float[Array, "B T E"],
    A_EN: Float[Array, "E N"],
    B_BTN: Float[Array, "B T N"],
    C_BTN: Float[Array, "B T N"],
    D_E: Float[Array, "E"] | None = None,
    *,
    initial_state: Float[Array, "B E N"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "B T E"] | tuple[Float[Array, "B T E"], Float[Array, "B E N"]]:
    """Outputs, in the dtype of `x_BTE`, and with `return_state` the float32 state after the last token.

    `dt_BTE` is at least 0 (after the softplus) and `A_EN` at most 0; float32 is advised for both. The result does not
    depend on `chunk_size` (default 32, at most T). Reverse mode only.
    """
    n_batch, seq_len, width = x_BTE.shape
    acc = accumulator(x_BTE, dt_BTE)
    if initial_state is None:
        initial_state = jnp.zeros((n_batch, width, A_EN.shape[1]), acc)
    chunk = min(chunk_size or CHUNK, seq_len)
    arrays = (x_BTE, dt_BTE.astype(acc), A_EN.astype(acc), B_BTN, C_BTN, initial_state.astype(acc))
    out: Any = _scan(*arrays, chunk)
    y_BTE, state = out
    if D_E is not None:
        y_BTE = (y_BTE.astype(acc) + D_E.astype(acc) * x_BTE).astype(x_BTE.dtype)
    return (y_BTE, state) if return_state else y_BTE


def _cut(chunk: int, *arrays: Any) -> list[Array]:
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
    return x.reshape(x.shape[0], -1, x.shape[-1])[:, :seq_len]


def _outer(x_E: Array, b_N: Array) -> Array:
    return x_E[..., :, None] * b_N[..., None, :]


def _starts(h: Array, x: Array, dt: Array, a_EN: Array, b: Array) -> tuple[Array, Array]:
    """The states at the starts of a group's chunks [B, G, E, N], and the one after the group."""
    g = jnp.cumsum(dt, axis=0)
    update = jnp.sum(jnp.exp((g[-1] - g)[..., None] * a_EN) * _outer(dt * x, b), axis=0)
    return carry_states(jnp.exp(g[-1][..., None] * a_EN), update, h)


def _advance(h: Array, x: Array, dt: Array, a_EN: Array, b: Array) -> Array:
    return jnp.exp(dt[..., None] * a_EN) * h + _outer(dt * x, b)


def _forward(x, dt, a_EN, b, c, initial, chunk):
    acc, seq_len = dt.dtype, x.shape[1]

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
    return (_join(y, seq_len).astype(x.dtype), last), heads


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _scan(x: Array, dt: Array, a_EN: Array, b: Array, c: Array, initial: Array, chunk: int) -> tuple[Array, Array]:
    return _forward(x, dt, a_EN, b, c, initial, chunk)[0]


def _scan_fwd(x, dt, a_EN, b, c, initial, chunk):
    out, heads = _forward(x, dt, a_EN, b, c, initial, chunk)
    return out, (x, dt, a_EN, b, c, heads)


def _scan_bwd(chunk: int, saved: Any, cotangents: Any):
    x, dt, a_EN, b, c, heads = saved
    dy, d_last = cotangents
    acc, seq_len = dt.dtype, x.shape[1]

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
    (d_initial, da_EN), grads = jax.lax.scan(group, (d_last, jnp.zeros_like(a_EN)), xs, reverse=True)
    dx, ddt, db, dc = (_join(t, seq_len) for t in grads)
    return dx.astype(x.dtype), ddt, da_EN, db.astype(b.dtype), dc.astype(c.dtype), d_initial


_scan.defvjp(_scan_fwd, _scan_bwd)
