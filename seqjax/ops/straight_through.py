"""Straight-through estimation: the value of one array, another's gradient.

    straight_through(hard, soft):   y = hard,  dL/dsoft = dL/dy,  dL/dhard = 0

The usual expression stop_gradient(hard - soft) + soft has the same gradient but rounds the value (in bf16, 1 - p + p
need not be 1); here the forward value is exactly `hard`. See Bengio et al., arXiv 1308.3432; arXiv 2505.18522 uses it
for Top-1 Element.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import accumulation_dtype


@jax.custom_vjp
def straight_through(hard: Float[Array, "..."], soft: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `hard`, with the gradient going to `soft`.

    Reverse mode only. Raises `ValueError` if the shapes differ.
    """
    _check(hard, soft)
    return hard


def _forward(hard: Array, soft: Array) -> tuple[Array, tuple[Array, Array]]:
    _check(hard, soft)
    # Empty arrays carry the dtypes to the backward rule.
    return hard, (hard[:0] if hard.ndim else hard, soft[:0] if soft.ndim else soft)


def _backward(dtypes: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    hard, soft = dtypes
    return jnp.zeros_like(dy, dtype=hard.dtype), dy.astype(soft.dtype)


straight_through.defvjp(_forward, _backward)


def top1_straight_through(scores: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Return the one-hot argmax along `axis` with the float32 softmax's gradient.

    Ties go to the first entry.
    """
    soft = jax.nn.softmax(scores.astype(accumulation_dtype(scores)), axis=axis).astype(scores.dtype)
    one_hot = jax.nn.one_hot(jnp.argmax(scores, axis=axis), scores.shape[axis], dtype=scores.dtype, axis=axis)
    return straight_through(one_hot, soft)


def _check(hard: Array, soft: Array) -> None:
    if hard.shape != soft.shape:
        raise ValueError(f"hard and soft must have the same shape, not {hard.shape} and {soft.shape}.")
