"""Initialisers: functions of key, shape and dtype that return initial values.

An initialiser for a single published model is in its mixer's file; shared initialisers are here.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from seqjax.types import Array, PRNGKey

Init = Callable[[PRNGKey, tuple[int, ...], Any], Array]


def normal(std: float) -> Init:
    """Return an initialiser that draws from N(0, std^2)."""
    return lambda key, shape, dtype: std * jax.random.normal(key, shape, dtype)


def uniform(bound: float) -> Init:
    """Return an initialiser that draws from U(-bound, bound)."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def log_uniform(low: float, high: float) -> Init:
    """Return an initialiser for log A, A uniform in [low, high), at least 1e-4."""
    return lambda key, shape, dtype: jnp.log(jnp.maximum(jax.random.uniform(key, shape, dtype, low, high), 1e-4))


def constant(value: float) -> Init:
    """Return an initialiser that sets every element to the same value."""
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


def values(x: Any) -> Init:
    """Return an initialiser that broadcasts `x` to the parameter's shape."""
    return lambda key, shape, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), shape)


GPT_INIT = normal(0.02)


def residual_init(n_layers: int) -> Init:
    """Return GPT's initialiser for matrices that write to the residual stream.

    There are two per layer. It draws from N(0, (0.02 / sqrt(2 L))^2).
    """
    return normal(0.02 / math.sqrt(2 * n_layers))


def orthogonal(scale: float = 1.0) -> Init:
    """Return an initialiser with orthogonal rows or columns.

    A widening matrix is scaled by sqrt(out / in). The initialiser applies Gram-Schmidt, twice per column, to a Gaussian
    matrix. It does not use `jax.nn.initializers.orthogonal`, because several LAPACK calls in one program deadlock on a
    CPU with two threads (jax 0.10.2); RWKV has seven.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        gain = scale * max(1.0, math.sqrt(shape[-1] / shape[-2]))
        long, short = max(shape), min(shape)

        def body(j: Any, q: Array) -> Array:
            done = jnp.where(jnp.arange(short) < j, q, 0)
            column = q[:, j]
            for _ in range(2):
                column = column - exact(done, exact(done.T, column))
            return q.at[:, j].set(column / jnp.linalg.norm(column))

        exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        q = jax.lax.fori_loop(0, short, body, jax.random.normal(key, (long, short), dtype))
        return gain * (q if shape[0] == long else q.T)

    return init


def dt_bias(key: PRNGKey, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw biases with softplus (the step size) log-uniform in [0.001, 0.1].

    Mamba and Gated DeltaNet use them.
    """
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1)))
    dt = jnp.maximum(dt, 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))  # the inverse of softplus
