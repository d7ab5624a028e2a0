"""The device mesh and the rules from logical axes to mesh axes.

The mesh has four axes: `data` (copies of the model), `fsdp` (parameters split, gathered layer by layer), `seq` (long
sequences split, seqjax/sequence_sharding.py) and `tensor` (heads, MLP and vocabulary split). On a laptop it is
1 x 1 x 1 x 1 and every rule is a no-op. XLA inserts the collectives ("pjit" is `jax.jit` with shardings); axis types
are Auto on purpose.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from seqjax.errors import UserError
from seqjax.types import Array, Params

AXES = ("data", "fsdp", "seq", "tensor")
# Logical axis -> mesh axis. A dimension that its mesh axis does not divide stays whole.
RULES: dict[str | None, str | None] = {
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "positions": None,
    "state": None,
    "conv": None,
    "rank": None,
    "layers": None,
    None: None,
}
BATCH = PartitionSpec(("data", "fsdp"))


def add_rule(logical_axis: str, mesh_axis: str | None) -> None:
    """Let parameters have `logical_axis`, split over `mesh_axis` ("fsdp" or "tensor") or whole (None).

    For a mixer from outside seqjax, whose file calls it once. Repeating a rule is no error, so that a notebook's cell
    may run again. Raises `UserError` for another rule of an axis that has one, and for another mesh axis.
    """
    if mesh_axis not in ("fsdp", "tensor", None):
        raise UserError(f"Parameters are not split over {mesh_axis!r}; choose 'fsdp', 'tensor', or None for whole.")
    if logical_axis in RULES and RULES[logical_axis] != mesh_axis:
        raise UserError(
            f"Logical axis {logical_axis!r} has the rule {RULES[logical_axis]!r} already; choose another name."
        )
    RULES[logical_axis] = mesh_axis


def make_mesh(
    *, data: int = -1, fsdp: int = 1, seq: int = 1, tensor: int = 1, devices: list[Any] | None = None
) -> Mesh:
    """Return a mesh over all devices; one size may be -1, which stands for all remaining devices.

    Raises `UserError` if the product of the sizes is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = [data, fsdp, seq, tensor]
    known = int(np.prod([s for s in shape if s != -1]))
    if shape.count(-1) > 1 or any(s < 1 and s != -1 for s in shape):
        raise UserError(f"config.mesh {dict(zip(AXES, shape))}: sizes are positive, and at most one is -1.")
    if -1 in shape:
        shape[shape.index(-1)] = len(devices) // known
    if int(np.prod(shape)) != len(devices) or 0 in shape:
        raise UserError(
            f"config.mesh {dict(zip(AXES, shape))} does not fit {len(devices)} device(s); "
            "set one size to -1, or sizes whose product is the number of devices."
        )
    return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def is_axes(leaf: Any) -> bool:
    """Return whether `leaf` is a tuple of logical axis names, which is a leaf of a tree of axes."""
    return isinstance(leaf, tuple)


def shardings(mesh: Mesh, shapes: Params, axes: Params) -> Params:
    """Return the sharding of every parameter, from its shape and its logical axes."""
    return jax.tree.map(
        lambda names, x: NamedSharding(mesh, PartitionSpec(*_mesh_axes(mesh.shape, names, x.shape))),
        axes,
        shapes,
        is_leaf=is_axes,
    )


def _mesh_axes(sizes: Mapping[str, int], names: tuple[str | None, ...], shape: tuple[int, ...]) -> list[str | None]:
    """Return the mesh axis over which each dimension of a parameter is split, if any."""
    found: list[str | None] = []
    for name, size in zip(names, shape):
        if name not in RULES:
            raise UserError(
                f"Logical axis {name!r} has no rule; give it one: seqjax.sharding.add_rule({name!r}, mesh_axis)."
            )
        mesh_axis = RULES[name]
        fits = mesh_axis is not None and mesh_axis not in found and size % sizes[mesh_axis] == 0
        found.append(mesh_axis if fits else None)
    return found


def gather_fsdp(x: Array, names: tuple[str | None, ...]) -> Array:
    """Constrain a parameter with these logical axes to be whole along `fsdp`; a no-op outside a mesh.

    XLA gathers the matrices of products so by itself, but not a table in which rows are looked up.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["fsdp"] == 1:
        return x
    kept = [None if axis == "fsdp" else axis for axis in _mesh_axes(mesh.shape, names, x.shape)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*kept))


def constrain_batch(x: Array) -> Array:
    """Constrain [B, T, D] or [B, D] to be split along B over the mesh's data axes, along T over `seq`, and no further.

    It is a no-op outside a mesh. An axis that the devices do not divide is not split. The gradient of `x` is
    constrained alike.

    What goes between a block's parts is constrained so, for speed and because XLA's partitioner computes wrong values
    otherwise: of a product over a dimension split over `tensor`, y [B, H] times the transpose of w [D, H], whose result
    is to be split over `tensor` along D, with w split over `fsdp` there (docs/sharding.md).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or all(size == 1 for size in mesh.shape.values()):
        return x
    if x.ndim > 2 and splits_time(mesh, x.shape[1]):
        return jax.lax.with_sharding_constraint(x, PartitionSpec(batch_axes(mesh, x.shape[0]), "seq"))
    return jax.lax.with_sharding_constraint(x, BATCH if batch_axes(mesh, x.shape[0]) else PartitionSpec())


def heads_split(n_batch: int, n_heads: int) -> PartitionSpec | None:
    """Return how [B, T, H, K] is split over the mesh in a mixer's core; None without a mesh of several devices.

    A dimension that its mesh axes do not divide stays whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or not set(AXES) <= set(mesh.shape):
        return None
    return PartitionSpec(batch_axes(mesh, n_batch), None, head_axes(mesh, n_heads))


def splits_time(mesh: AbstractMesh, seq_len: int) -> bool:
    """Return whether `seq` splits that many tokens; a prompt, or one token, that it does not divide stays whole."""
    n_pieces = mesh.shape.get("seq", 1)
    return n_pieces > 1 and seq_len % n_pieces == 0


def batch_axes(mesh: AbstractMesh, n_batch: int) -> tuple[str, ...] | None:
    """Return the mesh axes over which a batch is split; None for one that they do not divide."""
    return BATCH[0] if n_batch % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else None


def head_axes(mesh: AbstractMesh, n_heads: int) -> tuple[str, ...] | str | None:
    """Return the mesh axes over which a mixer's core splits heads: `tensor` and `seq`, or those of them that divide."""
    if mesh.shape["seq"] == 1:
        return "tensor" if n_heads % mesh.shape["tensor"] == 0 else None
    if n_heads % (mesh.shape["tensor"] * mesh.shape["seq"]) == 0:
        return ("tensor", "seq")
    return "seq" if n_heads % mesh.shape["seq"] == 0 else None


def replicate(tree: Any) -> Any:
    """Constrain every array of `tree` to be the same on every device of the mesh; a no-op outside a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, PartitionSpec())


def to_devices(local: np.ndarray | np.generic, sharding: NamedSharding) -> Array:
    """Return the global array of this process's part of it; the transfer is explicit, so the guard allows it."""
    with jax.transfer_guard("allow"):
        return jax.make_array_from_process_local_data(sharding, np.asarray(local))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that is the same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, *, leading: int = 0) -> NamedSharding:
    """Return the sharding that splits the batch axis over data and fsdp, after `leading` unsplit axes."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, ("data", "fsdp")))
