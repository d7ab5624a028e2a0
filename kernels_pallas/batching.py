"""`jax.vmap` of kernels: the mapped axis joins the batch axis, one launch for all.

A custom call has no batching rule of its own, and running it once per mapped element would give up the device. Every
operand and result of a kernel has the batch at the same place, so `[N, B, ...]` becomes `[N B, ...]` and back.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def fold_vmap(f: Callable, axis: int = 0) -> Callable:
    """`f(*arrays)`, arrays and results (one or a tuple) all with the batch on `axis`, batched by folding into it.

    Static arguments belong into a closure or a `partial`.
    """
    folded = jax.custom_batching.custom_vmap(f)

    def fold(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    @folded.def_vmap
    def rule(axis_size: int, in_batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        def unfold(x: Array) -> Array:
            x = x.reshape(*x.shape[:axis], axis_size, -1, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 0)

        full = [
            x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, is_batched in zip(arrays, in_batched, strict=True)
        ]
        out = jax.tree.map(unfold, folded(*(fold(x) for x in full)))  # again the folded one: vmap of vmap
        return out, jax.tree.map(lambda _: True, out)

    return folded
