"""MesaNet's recurrence: linear attention with the optimal regularised read.

    G_t = e^{g_t} G_{t-1} + beta_t k_t k_t^T,   S_t = e^{g_t} S_{t-1} + beta_t k_t v_t^T
    o_t = S_t^T x_t,   (G_t + diag(ridge)) x_t = q_t

von Oswald et al., arXiv 2506.05233; public implementation: flash-linear-attention, `fla/ops/mesa_net/naive.py`. x_t is
the result of conjugate gradients from 0, for all tokens at once: each step multiplies a vector per token by its G_t,
which is linear attention with values k (`ops/ssd.py`). The public code adds 1e-5 to the denominators; here a converged
token has a step of 0. The backward pass solves the same symmetric systems for the gradient of x, so it stores no steps.
All arithmetic is float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from seqjax.ops.ssd import ssd_of_heads
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 64


def mesa(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_g_BTH: Float[Array, "B T H"],
    beta_BTH: Float[Array, "B T H"],
    ridge_HK: Float[Array, "H K"],
    *,
    n_steps: int,
    initial_state: Float[Array, "B H K KV"] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K KV"]]:
    """Return the outputs and the last state, float32.

    The state is G and S side by side, [B, H, K, K + V]. `log_g_BTH` is at most 0, beta and ridge are positive.
    `n_steps` is the number of conjugate-gradient steps. The result does not depend on `chunk_size`.
    """
    wide = (x.astype(jnp.float32) for x in (q_BTHK, k_BTHK, v_BTHV, log_g_BTH, beta_BTH))
    q_BTHK, k_BTHK, v_BTHV, log_g_BTH, beta_BTH = map(time_to_heads, wide)
    n_batch, _, n_heads, n_key = k_BTHK.shape
    if initial_state is None:
        initial_state = jnp.zeros((n_batch, n_heads, n_key, n_key + v_BTHV.shape[-1]), jnp.float32)
    written_BTHK = beta_BTH[..., None] * k_BTHK
    chunk = min(chunk_size or CHUNK, k_BTHK.shape[1])
    with jax.default_matmul_precision("highest"):
        system = (k_BTHK, written_BTHK, log_g_BTH, ridge_HK, initial_state[..., :n_key])
        x_BTHK: Any = _solve(system, q_BTHK, n_steps, chunk)
        pair_BTHx = jnp.concatenate([k_BTHK, v_BTHV], axis=-1)
        o_BTHx, state_BHKx = _read(pair_BTHx, log_g_BTH, written_BTHK, x_BTHK, initial_state, chunk)
    return heads_to_time(o_BTHx[..., n_key:]), state_BHKx


def _read(values: Array, log_g: Array, written: Array, x: Array, state: Array, chunk: int) -> tuple[Array, Array]:
    backend = None if x.shape[1] == 1 else "xla"  # None has a form for one token
    return ssd_of_heads(values, log_g, written, x, initial_state=state, chunk_size=chunk, implementation=backend)


def _product(system: tuple[Array, ...], x_BTHK: Array, chunk: int) -> Array:
    """Return (G_t + diag(ridge)) x_t for every token."""
    k_BTHK, written_BTHK, log_g_BTH, ridge_HK, initial_BHKK = system
    return _read(k_BTHK, log_g_BTH, written_BTHK, x_BTHK, initial_BHKK, chunk)[0] + ridge_HK * x_BTHK


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _solve(system: tuple[Array, ...], q_BTHK: Array, n_steps: int, chunk: int) -> Array:
    """Return x with (G_t + diag(ridge)) x_t = q_t by conjugate gradients."""

    def ratio(x: Array, y: Array) -> Array:
        return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)

    def step(state: tuple[Array, ...], _: None) -> tuple[tuple[Array, ...], None]:
        x, r, p, r_r = state
        product = _product(system, p, chunk)
        alpha = ratio(r_r, jnp.sum(p * product, axis=-1, keepdims=True))
        x, r = x + alpha * p, r - alpha * product
        new_r_r = jnp.sum(r * r, axis=-1, keepdims=True)
        return (x, r, r + ratio(new_r_r, r_r) * p, new_r_r), None

    start = (jnp.zeros_like(q_BTHK), q_BTHK, q_BTHK, jnp.sum(q_BTHK * q_BTHK, axis=-1, keepdims=True))
    (x_BTHK, *_), _ = jax.lax.scan(step, start, length=n_steps)
    return x_BTHK


def _solve_forward(system: tuple[Array, ...], q_BTHK: Array, n_steps: int, chunk: int) -> tuple[Array, Any]:
    x: Any = _solve(system, q_BTHK, n_steps, chunk)
    return x, (system, x)


def _solve_backward(n_steps: int, chunk: int, saved: Any, dx_BTHK: Array) -> tuple[Any, Array]:
    system, x_BTHK = saved
    with jax.default_matmul_precision("highest"):
        dq: Any = _solve(system, dx_BTHK, n_steps, chunk)
        _, pull = jax.vjp(lambda system: _product(system, x_BTHK, chunk), system)
        return pull(-dq)[0], dq


_solve.defvjp(_solve_forward, _solve_backward)
