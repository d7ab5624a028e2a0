"""The `xla` backend of the selective scan on a CPU: token by token.

A token's states fit the cache of a core, and the channels fill the vector units. Chunks in parallel, as in `xla.py` for
devices with thousands of lanes, gain nothing here and take nine times as long (lab/log/mixers.md). States are [B, N, E]
with channels last, so a sum over the N states is a sum of vectors.

The forward pass keeps the state before each chunk of `chunk_size` tokens. The backward pass recomputes the states of a
chunk and goes back over its tokens. The largest array holds the states of one chunk: C x B x N x E. Equations:
`api.py`.
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import vary_alike
from kernels_pallas.chunks import join_chunks, split_chunks

CHUNK = 32


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
    """Return (y [B, T, E], last state, states [c, B, N, E] before the chunks)."""
    del keep  # XLA drops an unused result
    seq_len, A_NE = x_BTE.shape[1], A_EN.T
    chunk = min(chunk_size or CHUNK, seq_len)

    def one_chunk(h_BNE, xs):
        def token(h_BNE, xs):
            x_BE, dt_BE, b_BN, c_BN = xs
            h_BNE = _advance(h_BNE, x_BE, dt_BE, A_NE, b_BN)
            return h_BNE, jnp.sum(h_BNE * c_BN[:, :, None], axis=1)

        end_BNE, y_CBE = jax.lax.scan(token, h_BNE, xs)
        return end_BNE, (y_CBE, h_BNE)

    xs = _split(chunk, dt_BTE.dtype, x_BTE, dt_BTE, B_BTN, C_BTN)
    last_BNE, (y, kept) = jax.lax.scan(one_chunk, jnp.swapaxes(initial_BEN, 1, 2), xs)
    return (_join(y, seq_len) + D_E * x_BTE).astype(x_BTE.dtype), jnp.swapaxes(last_BNE, 1, 2), kept


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
    acc, seq_len, A_NE = dt_BTE.dtype, x_BTE.shape[1], A_EN.T
    chunk = min(chunk_size or CHUNK, seq_len)

    def one_chunk(carry, xs):
        first_BNE, x, dt, b, c, dy = xs

        def remember(h_BNE, xs):
            x_BE, dt_BE, b_BN = xs
            return _advance(h_BNE, x_BE, dt_BE, A_NE, b_BN), h_BNE

        _, before = jax.lax.scan(remember, first_BNE, (x, dt, b))

        def token(carry, xs):
            grad_BNE, dA_NE = carry
            h_BNE, x_BE, dt_BE, b_BN, c_BN, dy_BE = xs
            grad_BNE = grad_BNE + _outer(dy_BE, c_BN)
            a_BNE, added_BNE = jnp.exp(dt_BE[:, None] * A_NE), _outer(dt_BE * x_BE, b_BN)
            decayed_BNE = grad_BNE * a_BNE
            through_BNE = decayed_BNE * h_BNE
            grad_b_BE = jnp.sum(grad_BNE * b_BN[:, :, None], axis=1)
            ddt_BE = jnp.sum(through_BNE * A_NE, axis=1) + grad_b_BE * x_BE
            db_BN = jnp.sum(grad_BNE * (dt_BE * x_BE)[:, None], axis=2)
            dc_BN = jnp.sum((a_BNE * h_BNE + added_BNE) * dy_BE[:, None], axis=2)
            dA_NE = dA_NE + jnp.sum(through_BNE * dt_BE[:, None], axis=0)
            return (decayed_BNE, dA_NE), (grad_b_BE * dt_BE, ddt_BE, db_BN, dc_BN)

        return jax.lax.scan(token, carry, (before, x, dt, b, c, dy), reverse=True)

    xs = (kept, *_split(chunk, acc, x_BTE, dt_BTE, B_BTN, C_BTN, dy_BTE))
    start = vary_alike(jnp.swapaxes(d_last_BEN, 1, 2), jnp.zeros_like(A_NE))
    (d_initial_BNE, dA_NE), grads = jax.lax.scan(one_chunk, start, xs, reverse=True)
    dx, ddt, db, dc = (_join(t, seq_len) for t in grads)
    x32_BTE, dy32_BTE = x_BTE.astype(acc), dy_BTE.astype(acc)
    dx = (dx + D_E * dy32_BTE).astype(x_BTE.dtype)
    dD_E = jnp.sum(dy32_BTE * x32_BTE, axis=(0, 1))
    d_initial_BEN = jnp.swapaxes(d_initial_BNE, 1, 2)
    return dx, ddt, dA_NE.T, db.astype(B_BTN.dtype), dc.astype(C_BTN.dtype), dD_E, d_initial_BEN


def _split(chunk: int, acc: jnp.dtype, *arrays: Array) -> tuple[Array, ...]:
    """Reshape [B, T, .] to [c, C, B, .] for scans over chunks, then tokens."""
    return tuple(jnp.moveaxis(split_chunks(x.astype(acc), chunk), 0, 2) for x in arrays)


def _join(x: Array, seq_len: int) -> Array:
    return join_chunks(jnp.moveaxis(x, 2, 0), seq_len)


def _outer(x_BE: Array, b_BN: Array) -> Array:
    return x_BE[:, None, :] * b_BN[:, :, None]


def _advance(h_BNE: Array, x_BE: Array, dt_BE: Array, A_NE: Array, b_BN: Array) -> Array:
    return jnp.exp(dt_BE[:, None] * A_NE) * h_BNE + _outer(dt_BE * x_BE, b_BN)
