"""The device mesh, the logical-to-mesh axis rules, and sequence parallelism.

The mesh has four axes: `data` (model copies), `fsdp` (parameters split, gathered layer by layer), `seq` (long sequences
split) and `tensor` (heads, MLP and vocabulary split). On a laptop it is 1 x 1 x 1 x 1, and every rule is a no-op. XLA
inserts the collectives ("pjit" is `jax.jit` with shardings); axis types are Auto on purpose.

With `seq`, each device holds a time piece of every array [B, T, D] outside the mixer cores. A core, attention or a
recurrence, needs the whole past, but its heads are independent. In the core `seq` therefore splits heads, and an
all-to-all before and after exchanges time for heads (DeepSpeed-Ulysses, arXiv 2309.14509). Every kernel
sees whole sequences, no device waits for another, and the work of the causal half is balanced.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from seqjax.errors import UserError
from seqjax.types import Array, Params

AXES = ("data", "fsdp", "seq", "tensor")
# Logical axis -> mesh axis. A dimension that is not divisible by its mesh axis stays whole.
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
    """Add a rule: parameters with `logical_axis` are split over `mesh_axis`.

    `mesh_axis` is "fsdp", "tensor", or None for whole parameters. A mixer from outside seqjax calls this once in its
    file. Repeating a rule is allowed, because notebook cells run again. Raises `UserError` for an axis with a different
    rule and for any other mesh axis.
    """
    if mesh_axis not in ("fsdp", "tensor", None):
        raise UserError(f"Parameters are not split over {mesh_axis!r}; choose 'fsdp', 'tensor', or None (not split).")
    if logical_axis in RULES and RULES[logical_axis] != mesh_axis:
        raise UserError(
            f"Logical axis {logical_axis!r} has the rule {RULES[logical_axis]!r} already; choose another name."
        )
    RULES[logical_axis] = mesh_axis


def make_mesh(
    *, data: int = -1, fsdp: int = 1, seq: int = 1, tensor: int = 1, devices: list[Any] | None = None
) -> Mesh:
    """Return a mesh over all devices; one size may be -1 (all remaining devices).

    Raises `UserError` if the product of the sizes is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = [data, fsdp, seq, tensor]
    known = int(np.prod([s for s in shape if s != -1]))
    if shape.count(-1) > 1 or any(s < 1 and s != -1 for s in shape):
        raise UserError(f"config.mesh {dict(zip(AXES, shape))}: sizes must be positive, and at most one may be -1.")
    if -1 in shape:
        shape[shape.index(-1)] = len(devices) // known
    if int(np.prod(shape)) != len(devices) or 0 in shape:
        raise UserError(
            f"config.mesh {dict(zip(AXES, shape))} does not fit {len(devices)} device(s); "
            "set one size to -1, or sizes whose product is the number of devices."
        )
    return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def is_axes(leaf: Any) -> bool:
    """Return whether `leaf` is a tuple of logical axis names.

    Such a tuple is a leaf in a tree of axes.
    """
    return isinstance(leaf, tuple)


def shardings(mesh: Mesh, shapes: Params, axes: Params) -> Params:
    """Return each parameter's sharding, from its shape and its logical axes."""
    return jax.tree.map(
        lambda names, x: NamedSharding(mesh, PartitionSpec(*_mesh_axes(mesh.shape, names, x.shape))),
        axes,
        shapes,
        is_leaf=is_axes,
    )


def _mesh_axes(sizes: Mapping[str, int], names: tuple[str | None, ...], shape: tuple[int, ...]) -> list[str | None]:
    """Return the mesh axis that splits each dimension of a parameter, or None."""
    mesh_axes: list[str | None] = []
    for name, size in zip(names, shape):
        if name not in RULES:
            raise UserError(
                f"Logical axis {name!r} has no rule; give it one: seqjax.sharding.add_rule({name!r}, mesh_axis)."
            )
        mesh_axis = RULES[name]
        fits = mesh_axis is not None and mesh_axis not in mesh_axes and size % sizes[mesh_axis] == 0
        mesh_axes.append(mesh_axis if fits else None)
    return mesh_axes


def gather_fsdp(x: Array, names: tuple[str | None, ...]) -> Array:
    """Constrain a parameter to be whole along `fsdp`; a no-op outside a mesh.

    `names` are its logical axes. XLA gathers matrices for products by itself, but not a table for row lookups.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["fsdp"] == 1:
        return x
    axes = [None if axis == "fsdp" else axis for axis in _mesh_axes(mesh.shape, names, x.shape)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def whole_matrices(x: Array) -> Array:
    """Constrain a stack of matrices [..., in, out] to whole matrices per device.

    The devices share the first axis of the stack, over the mesh axes that divide it; each device holds the rest. It is
    a no-op outside a mesh or on a single device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    axes, left = list[str](), x.shape[0] if x.ndim > 2 else 1
    for axis, size in mesh.shape.items():
        if size > 1 and left % size == 0:
            axes, left = [*axes, axis], left // size
    return jax.lax.with_sharding_constraint(x, PartitionSpec(tuple(axes)) if axes else PartitionSpec())


def constrain_batch(x: Array) -> Array:
    """Constrain [B, T, D] or [B, D] to be split along B, and along T over `seq`.

    B is split over the mesh's data axes; other dimensions stay whole. It is a no-op outside a mesh. An axis that the
    devices do not divide is not split. The gradient has the same constraint.

    Arrays between the parts of a block are constrained for speed, and because XLA's partitioner otherwise computes
    wrong values for some products. An example is y [B, H] times the transpose of w [D, H], with H split over `tensor`
    and w split over `fsdp` along D, if the result is to be split over `tensor` along D (docs/sharding.md).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or all(size == 1 for size in mesh.shape.values()):
        return x
    if x.ndim > 2 and splits_time(mesh, x.shape[1]):
        return jax.lax.with_sharding_constraint(x, PartitionSpec(batch_axes(mesh, x.shape[0]), "seq"))
    return jax.lax.with_sharding_constraint(x, BATCH if batch_axes(mesh, x.shape[0]) else PartitionSpec())


def heads_split(n_batch: int, n_heads: int) -> PartitionSpec | None:
    """Return the sharding of [B, T, H, K] in a mixer's core.

    None outside a mesh or on a single device. A dimension that its mesh axes do not divide stays whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or not set(AXES) <= set(mesh.shape):
        return None
    return PartitionSpec(batch_axes(mesh, n_batch), None, head_axes(mesh, n_heads))


def splits_time(mesh: AbstractMesh, seq_len: int) -> bool:
    """Return whether `seq` splits `seq_len` tokens.

    A prompt or a token that it does not divide stays whole.
    """
    n_pieces = mesh.shape.get("seq", 1)
    return n_pieces > 1 and seq_len % n_pieces == 0


def splits_vocabulary(n_vocab: int) -> bool:
    """Return whether the mesh splits a vocabulary of this size, and so the logits.

    False outside a mesh.
    """
    return _splits("vocab", n_vocab)


def splits_channels(width: int) -> bool:
    """Return whether the mesh splits `width` channels of a mixer's heads.

    False outside a mesh.
    """
    return _splits("heads", width)


def _splits(logical_axis: str, size: int) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    if not set(AXES) <= set(mesh.shape):
        return False
    (mesh_axis,) = _mesh_axes(mesh.shape, (logical_axis,), (size,))
    return mesh_axis is not None and mesh.shape[mesh_axis] > 1


def batch_axes(mesh: AbstractMesh, n_batch: int) -> tuple[str, ...] | None:
    """Return the mesh axes that split a batch; None if they do not divide it."""
    return BATCH[0] if n_batch % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else None


def head_axes(mesh: AbstractMesh, n_heads: int) -> tuple[str, ...] | str | None:
    """Return the mesh axes over which a mixer's core splits heads.

    These are `tensor` and `seq`, or the subset that divides the heads.
    """
    if mesh.shape["seq"] == 1:
        return "tensor" if n_heads % mesh.shape["tensor"] == 0 else None
    if n_heads % (mesh.shape["tensor"] * mesh.shape["seq"]) == 0:
        return ("tensor", "seq")
    return "seq" if n_heads % mesh.shape["seq"] == 0 else None


def replicate(tree: Any) -> Any:
    """Constrain each array of `tree` to be the same on all devices.

    It is a no-op outside a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, PartitionSpec())


def to_devices(local: np.ndarray | np.generic, sharding: NamedSharding) -> Array:
    """Return the global array from this process's part.

    The transfer is explicit; the transfer guard allows it.
    """
    with jax.transfer_guard("allow"):
        return jax.make_array_from_process_local_data(sharding, np.asarray(local))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding for an array that is the same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, *, leading: int = 0) -> NamedSharding:
    """Return the sharding that splits the batch axis over data and fsdp.

    The batch axis follows `leading` unsplit axes.
    """
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, ("data", "fsdp")))


def require_equal_pieces(seq_len: int, mesh: Mesh) -> None:
    """Raise `UserError` if `seq` cannot split sequences of `seq_len` tokens."""
    n_pieces = mesh.shape["seq"]
    if seq_len % n_pieces:
        raise UserError(
            f"config.mesh.seq={n_pieces} does not divide config.train.seq_len={seq_len}; change one of them."
        )
    process_of = np.array([device.process_index for device in mesh.devices.flat])
    if n_pieces > 1 and not _within_processes(process_of, n_pieces * mesh.shape["tensor"]):
        raise UserError(
            f"config.mesh.seq={n_pieces} would split sequences across processes, which read different sequences; "
            "config.mesh.seq times config.mesh.tensor must divide the number of devices per process."
        )


def _within_processes(process_of: np.ndarray, n_sharing: int) -> bool:
    """Return whether each group of `n_sharing` consecutive devices is in one process.

    `process_of` is each device's process.
    """
    shares = process_of.reshape(-1, n_sharing)
    return bool((shares == shares[:, :1]).all())


def time_to_heads(x: Array) -> Array:
    """Exchange one time piece with all heads for the full time with some heads.

    Operands [B, T, H, ...] of a mixer's core go through this if they have heads (or channels); results go through
    `heads_to_time`. Both are no-ops unless the mesh's `seq` splits T. Raises `UserError` if `seq` does not divide H.
    """
    return _exchange(x, to_heads=True)


def heads_to_time(x: Array) -> Array:
    """Exchange the full time with some heads for one time piece with all heads, [B, T, H, ...]."""
    return _exchange(x, to_heads=False)


def keep_time(x: Array) -> Array:
    """Constrain [B, T, H, ...] and its gradient to the layout after `heads_to_time`.

    This layout is a time piece of all heads. XLA would otherwise propagate the split over heads to later operations and
    gather the gradient's time for it.
    """
    return jax.lax.with_sharding_constraint(x, _by_time(x)) if _is_split(x) else x


def gather_time(x: Array) -> Array:
    """Gather the time of [B, T, ...] on each `seq` device.

    This is for inputs that the heads of a mixer's core share.
    """
    if not _is_split(x):
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(constrain_batch(x), PartitionSpec(batch_axes(mesh, x.shape[0])))


def time_pieces(x: Array) -> int:
    """Return the number of time pieces into which `seq` splits [B, T, ...].

    1 without `seq`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape["seq"] if _is_split(x) else 1


def token_pieces(x: Array) -> int:
    """Return the number of token pieces on the mesh.

    The tokens are [B, T, ...], split along B and T. 1 outside a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not batch_axes(mesh, x.shape[0]):
        return time_pieces(x)
    return mesh.shape["data"] * mesh.shape["fsdp"] * time_pieces(x)


def copies(w: Array, pieces: int) -> Array:
    """Return [N, ...], a copy of a parameter per token piece, on the piece's device.

    The parameter's gradient is the sum of the copies' gradients. This sum over devices is taken once, even if a copy's
    gradient has several terms.
    """
    return constrain_pieces(jnp.broadcast_to(w, (pieces, *w.shape)), pieces)


def constrain_pieces(x: Array, pieces: int) -> Array:
    """Constrain [N * R, ...] to be split into the N token pieces.

    Other axes are left to XLA.
    """
    if pieces == 1:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    axes = ("seq", *(BATCH[0] if pieces > mesh.shape["seq"] else ()))
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, *free))


def time_to_rows(x: Array, before: Array | None = None) -> Array:
    """Return the time pieces of [B, T, ...] as rows, [S * B, T / S, ...].

    This is for operations within a token. Rows are ordered by piece, then by sequence. `before` holds the W tokens [B,
    W, ...] before the first, W <= T / S; each row then begins with the W tokens before it: [S * B, W + T / S, ...].
    """
    n_pieces = time_pieces(x)
    n_batch, seq_len, *rest = x.shape
    if n_pieces > 1:
        mesh = jax.sharding.get_abstract_mesh()
        batch = batch_axes(mesh, n_batch)
        by_piece, by_row = PartitionSpec("seq", batch), PartitionSpec(("seq", *(batch or ())))
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(batch, "seq"))
        x = jnp.swapaxes(x.reshape(n_batch, n_pieces, seq_len // n_pieces, *rest), 0, 1)
        if before is not None:
            last = jax.lax.with_sharding_constraint(x[:, :, x.shape[2] - before.shape[1] :], by_piece)
            is_first = jnp.arange(n_pieces).reshape(-1, *[1] * before.ndim) == 0
            x = jnp.concatenate([jnp.where(is_first, before, jnp.roll(last, 1, axis=0)), x], axis=2)
        return jax.lax.with_sharding_constraint(x.reshape(n_pieces * n_batch, -1, *rest), by_row)
    return x if before is None else jnp.concatenate([before, x], axis=1)


def rows_to_time(x: Array, n_batch: int) -> Array:
    """Return rows of `time_to_rows` as sequences.

    [S * B, T / S, ...] becomes [B, T, ...].
    """
    n_rows, piece, *rest = x.shape
    if n_rows == n_batch:
        return x
    return constrain_batch(jnp.swapaxes(x.reshape(-1, n_batch, piece, *rest), 0, 1).reshape(n_batch, -1, *rest))


def layer_gradients_first(params: Params, x_BTD: Array, carry: Any) -> tuple[Params, Array, Any]:
    """Return a layer's inputs and order the backward pass layer by layer.

    All gradients of the layer are completed before the backward pass enters the previous layer. It is a no-op unless
    `seq` splits T. Without this order, XLA's latency-hiding scheduler on GPUs may move the products for the parameter
    gradients after the backward pass of all layers. Their operands, several arrays [B, T, D] per layer, are kept until
    then. This uses up the memory that splitting the time saves. A scan over the layers needs no such order, because its
    body ends with the layer.
    """
    if time_pieces(x_BTD) == 1:
        return params, x_BTD, carry
    inputs: Any = _gradients_together((params, x_BTD, carry))
    return inputs


@jax.custom_vjp
def _gradients_together(tree: Any) -> Any:
    return tree


def _gradients_together_forward(tree: Any) -> tuple[Any, None]:
    return tree, None


def _gradients_together_backward(saved: None, gradients: Any) -> tuple[Any]:
    del saved
    leaves, structure = jax.tree.flatten(gradients)
    # Integer inputs have float0 gradients, which no operation accepts.
    real = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    for i, leaf in zip(real, jax.lax.optimization_barrier([leaves[i] for i in real]), strict=True):
        leaves[i] = leaf
    return (jax.tree.unflatten(structure, leaves),)


_gradients_together.defvjp(_gradients_together_forward, _gradients_together_backward)


def _exchange(x: Array, *, to_heads: bool) -> Array:
    # Both sides are constrained; otherwise XLA would gather whole inputs and multiply them by a share of the
    # projections.
    if not _is_split(x):
        return x
    mesh = jax.sharding.get_abstract_mesh()
    n_batch, _, n_heads = x.shape[:3]
    if n_heads % mesh.shape["seq"]:
        raise UserError(
            f"config.mesh.seq={mesh.shape['seq']} does not divide the {n_heads} heads (or channels) of a mixer, which "
            "its devices share; choose a divisor of every mixer's heads (key-value heads, if fewer)."
        )
    by_time, by_heads = _by_time(x), PartitionSpec(batch_axes(mesh, n_batch), None, head_axes(mesh, n_heads))
    for spec in (by_time, by_heads) if to_heads else (by_heads, by_time):
        x = jax.lax.with_sharding_constraint(x, spec)
    return x


def _by_time(x: Array) -> PartitionSpec:
    mesh = jax.sharding.get_abstract_mesh()
    n_batch, _, n_heads = x.shape[:3]
    return PartitionSpec(batch_axes(mesh, n_batch), "seq", "tensor" if n_heads % mesh.shape["tensor"] == 0 else None)


def _is_split(x: Array) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and splits_time(mesh, x.shape[1])
