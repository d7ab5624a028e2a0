"""Rules for kernels under `jax.vmap`, `jax.shard_map` and automatic sharding.

A custom call has no such rules.

vmap: operands and results have the batch first, so `[N, B, ...]` becomes `[N B, ...]` and back, with one launch. One
call per mapped element would leave the device mostly idle.

Automatic sharding: batch entries and heads are independent. Each device runs the kernel on its share, and sums over the
batch or heads are added across devices. Without a rule, XLA would gather every operand on every device. The rule
follows the sharding that XLA propagates. `jax.shard_map` around the kernel would need the mesh axes, and would force
one layout on the operands.

shard_map: results vary over the mesh axes over which the operands vary.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas.triton import interpreter


def fold_vmap(
    f: Callable, rule: str, *, g: int = 1, r: int = 1, split: Sequence[str] = ("b", "g"), axis: int | None = 0
) -> Callable:
    """Return `f(*arrays)` with rules for vmap and sharding.

    Arrays and results have the batch on `axis`; with None, where `rule` has "b". `rule`, `g`, `r` and `split` are as in
    `partitioned`. Derivatives are not covered. Bind static arguments with a `partial`.
    """
    folded = jax.custom_batching.custom_vmap(_split_over_mesh(f, rule, g=g, r=r, split=split))

    def axes(side: str, count: int) -> list[int]:
        return [dims.split().index("b") for dims in side.split(",")] if axis is None else [axis] * count

    def fold(x: Array, axis: int) -> Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    @folded.def_vmap
    def batched(axis_size: int, in_batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        def unfold(x: Array, axis: int) -> Array:
            x = x.reshape(*x.shape[:axis], axis_size, -1, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 0)

        full = [
            x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, is_batched in zip(arrays, in_batched, strict=True)
        ]
        operands, results = rule.split("->")
        # `folded`, not `f`: supports vmap of vmap
        out = folded(*map(fold, full, axes(operands, len(full))))
        leaves, structure = jax.tree.flatten(out)
        out = jax.tree.unflatten(structure, map(unfold, leaves, axes(results, len(leaves))))
        return out, jax.tree.map(lambda _: True, out)

    def call(*arrays: Array) -> Any:
        return varying_with(arrays, folded(*vary_alike(*arrays)))

    return call


def loop_vmap(f: Callable, rule: str) -> Callable:
    """Return `f(*arrays)` with a sharding rule; vmap calls `f` once per element.

    For functions that have an operand or result without a batch axis. Otherwise as `fold_vmap`.
    """
    looped = jax.custom_batching.sequential_vmap(_split_over_mesh(f, rule))
    return lambda *arrays: varying_with(arrays, looped(*vary_alike(*arrays)))


def _split_over_mesh(f: Callable, rule: str, **options: Any) -> Callable:
    # The interpreter's callback does not survive the partitioner, so in the interpreter operands are gathered.
    return f if interpreter.is_chosen() else partitioned(f, rule, **options)


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """Return the arrays, all varying over the same mesh axes under `jax.shard_map`.

    If an array was equal on several devices, its gradient is then the sum over these devices.
    """
    axes = frozenset().union(*(_varying_axes(x) for x in arrays))
    return tuple(_varying(x, axes) for x in arrays)


def varying_with(operands: tuple[Array, ...], results: Any) -> Any:
    """Return the results of a custom call, marked as varying like its operands.

    They vary over every mesh axis over which an operand varies; the call itself does not declare this.
    """
    axes = frozenset().union(*(_varying_axes(x) for x in operands))
    return jax.tree.map(lambda x: _varying(x, axes), results)


class Heads(TypedDict):
    """Sizes for a sharding rule: `g` key-value heads with `r` query heads each."""

    g: int
    r: int


def heads(per_head: Array, per_kv_head: Array) -> Heads:
    """Return {"g": G, "r": H / G} for arrays [B, T, H, ...] and [B, T, G, ...]."""
    H, G = per_head.shape[2], per_kv_head.shape[2]
    return {"g": G, "r": H // G}


def partitioned(f: Callable, rule: str, *, g: int = 1, r: int = 1, split: Sequence[str] = ("b", "g")) -> Callable:
    """Return `f` with a sharding rule.

    The dims listed in `split` (batch and key-value heads) may be sharded; `f` must work on any share of them. `rule`
    lists every dim as in einops; `g` and `r` are the sizes of its heads. Example:

        b t (g r) k, b t g k -> b t (g r)

    If a result lacks a dim in `split`, it is a sum over the dim, as in einsum, and the devices' shares are added.
    """
    if r == 1 or g == 1:  # brackets may not contain a factor of size 1
        rule = rule.replace("(g r)", "g" if r == 1 else "r")
    sides = [[re.findall(r"\(.*?\)|\w+", dims) for dims in side.split(",")] for side in rule.split("->")]
    wrapped = custom_partitioning(lambda *arrays: f(*arrays))  # custom_partitioning cannot inspect a partial

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> tuple:
        # the propagated shardings are proposals: use them for the dims in `split`, and replicate all other dims
        operand_shapes, results = tuple(arg_shapes), jax.tree.leaves(result_shape)
        axes = _proposed(mesh, operand_shapes, sides[0], split)
        by_dim = axes | {"(g r)": axes.get("g", ())}
        specs = [
            [NamedSharding(mesh, P(*(by_dim.get(dim) or None for dim in dims))) for dims in side] for side in sides
        ]
        assert (len(specs[0]), len(specs[1])) == (len(operand_shapes), len(results)), rule
        names = [set(re.findall(r"\w+", " ".join(dims))) for dims in sides[1]]
        summed = [tuple(axis for name in axes if name not in kept for axis in axes[name]) for kept in names]

        def share(*arrays: Array) -> Any:
            out = f(*arrays)
            leaves = [
                jax.lax.psum(x, over) if over else x for x, over in zip(jax.tree.leaves(out), summed, strict=True)
            ]
            return jax.tree.unflatten(jax.tree.structure(out), leaves)

        return mesh, share, jax.tree.unflatten(jax.tree.structure(result_shape), specs[1]), tuple(specs[0])

    whole = tuple(name for name in dict.fromkeys(re.findall(r"\w+", rule)) if name not in split)
    sizes: dict[str, Any] = {"r": r} if "(g r)" in rule else {}
    wrapped.def_partition(partition, sharding_rule=rule, need_replication_factors=whole, **sizes)
    return wrapped


def _proposed(
    mesh: Any, operand_shapes: tuple, operands: list[list[str]], split: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the mesh axes of every name in `split`.

    They come from the first operand dim that the axes divide.
    """
    axes_of: dict[str, tuple[str, ...]] = {}
    for shape, dims in zip(operand_shapes, operands, strict=True):
        for axes, dim, size in zip(getattr(shape.sharding, "spec", ()), dims, shape.shape, strict=False):
            names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
            n_shares = math.prod(mesh.shape[name] for name in names)
            is_free = not set(names) & {name for taken in axes_of.values() for name in taken}
            if dim in split and dim not in axes_of and is_free and n_shares > 1 and size % n_shares == 0:
                axes_of[dim] = names
    return axes_of


def _varying(x: Array, axes: frozenset) -> Array:
    missing = tuple(sorted(axes - _varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying_axes(x: Array) -> frozenset:
    """Return the mesh axes over which x may differ under `jax.shard_map`.

    Outside `jax.shard_map` there are none.
    """
    aval: Any = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # jax 0.10.2 and later; `vma` in some of them
    return frozenset(getattr(aval, "vma", ()) if manual is None else manual.varying)
