"""`jax.vmap` of kernels: the mapped axis joins the batch axis, one launch for all.

A custom call has no batching rule of its own, and running it once per mapped element would give up the device. Every
operand and result of the kernels has the batch first, so `[N, B, ...]` becomes `[N B, ...]` and back.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def fold_vmap(f: Callable) -> Callable:
    """`f(*arrays)`, arrays and results (one or a tuple) all `[B, ...]`, batched under vmap by folding into B.

    Static arguments belong into a closure or a `partial`.
    """
    folded = jax.custom_batching.custom_vmap(f)

    @folded.def_vmap
    def rule(axis_size: int, in_batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        full = [
            x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, is_batched in zip(arrays, in_batched, strict=True)
        ]
        out = folded(*(x.reshape(-1, *x.shape[2:]) for x in full))  # again the folded one: vmap of vmap
        out = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return folded
