"""Kernels under `jax.vmap`, `jax.shard_map` and automatic sharding: a custom call has rules for none of them.

vmap       Every operand and result has the batch first: `[N, B, ...]` becomes `[N B, ...]` and back, one launch for
           all. Running the call once per mapped element would give up the device.
shardings  Batch entries and key-value heads are independent: under jit over a mesh each device runs the kernel on its
           own. Without a rule XLA would gather every operand on every device.
shard_map  The results vary over the mesh axes that the operands vary over.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas.triton import interpreter


def fold_vmap(f: Callable, rule: str | None = None, *, g: int = 1, r: int = 1, axis: int = 0) -> Callable:
    """Return `f(*arrays)` with rules for vmap and sharding; arrays and results have the batch on `axis`.

    Derivatives are not covered. Bind static arguments with a `partial`. `rule`, `g` and `r` are as in `partitioned`.
    """
    # The interpreter's callback does not survive the partitioner, so with it the operands are gathered.
    inner = f if rule is None or interpreter.is_chosen() else partitioned(f, rule, g=g, r=r)
    folded = jax.custom_batching.custom_vmap(inner)

    def fold(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    @folded.def_vmap
    def batched(axis_size: int, in_batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        def unfold(x: Array) -> Array:
            x = x.reshape(*x.shape[:axis], axis_size, -1, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 0)

        full = [
            x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, is_batched in zip(arrays, in_batched, strict=True)
        ]
        out = jax.tree.map(unfold, folded(*(fold(x) for x in full)))  # again the folded one: vmap of vmap
        return out, jax.tree.map(lambda _: True, out)

    def call(*arrays: Array) -> Any:
        return varying_with(arrays, folded(*vary_alike(*arrays)))

    return call


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """Return the arrays such that under `jax.shard_map` all of them vary over the same mesh axes.

    The gradient of an array that was the same on several devices is then the sum over these.
    """
    axes = frozenset().union(*(_varying_axes(x) for x in arrays))
    return tuple(_varying(x, axes) for x in arrays)


def varying_with(operands: tuple[Array, ...], results: Any) -> Any:
    """The results of a custom call, which varies over every axis that an operand varies over and does not say so."""
    axes = frozenset().union(*(_varying_axes(x) for x in operands))
    return jax.tree.map(lambda x: _varying(x, axes), results)


def heads(per_head: Array, per_kv_head: Array) -> dict[str, int]:
    """Return the sizes {"g": G, "r": H / G} of arrays [B, T, H, ...] and [B, T, G, ...] for a sharding rule."""
    H, G = per_head.shape[2], per_kv_head.shape[2]
    return {"g": G, "r": H // G}


def partitioned(f: Callable, rule: str, *, g: int, r: int) -> Callable:
    """`f` with a sharding rule: dims named `b` and `g` (batch and key-value heads) may be sharded, all others not.

    `rule` names every dim as in einops, "b t (g r) k, b t g k -> b t (g r)"; `g` and `r` are the sizes of its heads.
    `f` must work on any share of the batch and of the heads.
    """
    if r == 1 or g == 1:  # a factor of size 1 has no place in brackets
        rule = rule.replace("(g r)", "g" if r == 1 else "r")
    sides = [[re.findall(r"\(.*?\)|\w+", dims) for dims in side.split(",")] for side in rule.split("->")]
    wrapped = custom_partitioning(lambda *arrays: f(*arrays))  # it cannot look into a partial

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> tuple:
        # the propagated shardings are proposals: take the batch's and the heads' and split nothing else
        given, results = tuple(arg_shapes), jax.tree.leaves(result_shape)
        b_axes = _proposed(mesh, given, sides[0], "b", given[0].shape[0])
        g_axes = _proposed(mesh, given, sides[0], "g", g)
        by_dim = {"b": b_axes, "g": g_axes, "(g r)": g_axes}
        specs = [[NamedSharding(mesh, P(*(by_dim.get(dim) for dim in dims))) for dims in side] for side in sides]
        assert (len(specs[0]), len(specs[1])) == (len(given), len(results)), rule
        return mesh, f, jax.tree.unflatten(jax.tree.structure(result_shape), specs[1]), tuple(specs[0])

    whole = tuple(name for name in dict.fromkeys(re.findall(r"\w+", rule)) if name not in ("b", "g"))
    sizes: dict[str, Any] = {"r": r} if "(g r)" in rule else {}
    wrapped.def_partition(partition, sharding_rule=rule, need_replication_factors=whole, **sizes)
    return wrapped


def _proposed(mesh: Any, given: tuple, operands: list[list[str]], factor: str, size: int) -> Any:
    """Return the mesh axes over which an operand's dimension named `factor` is sharded, if they divide `size`."""
    for shape, dims in zip(given, operands, strict=True):
        spec = getattr(shape.sharding, "spec", ())
        for axes, dim in zip(spec, dims, strict=False):
            names = axes if isinstance(axes, tuple) else (axes,)
            if axes is not None and dim == factor and size % math.prod(mesh.shape[name] for name in names) == 0:
                return axes
    return None


def _varying(x: Array, axes: frozenset) -> Array:
    missing = tuple(sorted(axes - _varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying_axes(x: Array) -> frozenset:
    """Return the mesh axes over which x may differ under `jax.shard_map`; none outside."""
    aval: Any = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # jax 0.10.2 and later; `vma` in some of them
    return frozenset(getattr(aval, "vma", ()) if manual is None else manual.varying)
