"""Sequences split over the devices of the mesh's axis `seq`; without it, everything here is a no-op.

With `seq`, a device has a piece of the time of every array [B, T, D] between a mixer's core and the next one's. The
core itself, attention or a recurrence, needs all of the past, but its heads are independent: there `seq` splits heads,
and an all-to-all before and after exchanges time for heads (DeepSpeed-Ulysses, arXiv 2309.14509). So every kernel sees
whole sequences, no device waits for the one before it, and the causal half is shared equally.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from seqjax.errors import UserError
from seqjax.sharding import BATCH, batch_axes, constrain_batch, head_axes, splits_time
from seqjax.types import Array, Params


def require_equal_pieces(seq_len: int, mesh: Mesh) -> None:
    """Raise `UserError` if sequences of that many tokens cannot be split over the mesh's `seq`."""
    n_pieces = mesh.shape["seq"]
    if seq_len % n_pieces:
        raise UserError(
            f"config.mesh.seq={n_pieces} does not divide config.train.seq_len={seq_len}; change one of them."
        )
    process_of = np.array([device.process_index for device in mesh.devices.flat])
    if n_pieces > 1 and not _within_processes(process_of, n_pieces * mesh.shape["tensor"]):
        raise UserError(
            f"config.mesh.seq={n_pieces} would split sequences between processes, each of which reads its own; "
            "config.mesh.seq times config.mesh.tensor must divide the number of devices of one process."
        )


def _within_processes(process_of: np.ndarray, n_sharing: int) -> bool:
    """Return whether every `n_sharing` devices in a row are of one process, given each device's."""
    shares = process_of.reshape(-1, n_sharing)
    return bool((shares == shares[:, :1]).all())


def time_to_heads(x: Array) -> Array:
    """Exchange a piece of the time of all heads of [B, T, H, ...] for all of the time of a share of the heads.

    The operands of a mixer's core go through this where they have heads (or channels), and its result through
    `heads_to_time`. Both are no-ops unless the mesh's `seq` splits T. Raises `UserError` if `seq` does not divide H.
    """
    return _exchange(x, to_heads=True)


def heads_to_time(x: Array) -> Array:
    """Exchange all of the time of a share of the heads of [B, T, H, ...] for a piece of the time of all heads."""
    return _exchange(x, to_heads=False)


def gather_time(x: Array) -> Array:
    """Gather the time of [B, T, ...], which the heads of a mixer's core share, on every device of `seq`."""
    if not _is_split(x):
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(constrain_batch(x), PartitionSpec(batch_axes(mesh, x.shape[0])))


def time_pieces(x: Array) -> int:
    """Return the number of pieces into which the mesh's `seq` splits the time of [B, T, ...]; 1 without it."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape["seq"] if _is_split(x) else 1


def token_pieces(x: Array) -> int:
    """Return the number of pieces into which the mesh splits the tokens of [B, T, ...], along B and T; 1 outside it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not batch_axes(mesh, x.shape[0]):
        return time_pieces(x)
    return mesh.shape["data"] * mesh.shape["fsdp"] * time_pieces(x)


def copies(w: Array, pieces: int) -> Array:
    """Return [N, ...], a copy of a parameter for each of the `pieces` of a batch's tokens, on the device that has it.

    The gradient of the parameter is the sum of theirs, taken over the devices once, whatever each is the sum of.
    """
    return constrain_pieces(jnp.broadcast_to(w, (pieces, *w.shape)), pieces)


def constrain_pieces(x: Array, pieces: int) -> Array:
    """Constrain [N * R, ...] to be split into the `pieces` N, those of a batch's tokens; other axes are left to XLA."""
    if pieces == 1:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    axes = ("seq", *(BATCH[0] if pieces > mesh.shape["seq"] else ()))
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, *free))


def time_to_rows(x: Array, before: Array | None = None) -> Array:
    """Return the pieces of time of [B, T, ...] as rows, [S * B, T / S, ...], for what does not reach across tokens.

    Rows are ordered by piece, then by sequence. With `before`, the W tokens [B, W, ...] before the first, W <= T / S,
    every row begins with the W tokens before it: [S * B, W + T / S, ...].
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
    """Return the rows of `time_to_rows` as sequences again: [S * B, T / S, ...] to [B, T, ...]."""
    n_rows, piece, *rest = x.shape
    if n_rows == n_batch:
        return x
    return constrain_batch(jnp.swapaxes(x.reshape(-1, n_batch, piece, *rest), 0, 1).reshape(n_batch, -1, *rest))


def layer_gradients_first(params: Params, x_BTD: Array, carry: Any) -> tuple[Params, Array, Any]:
    """Return what a layer gets; the backward pass has the gradients of all of it before it goes to the layer before.

    It is a no-op unless `seq` splits T. XLA's latency-hiding scheduler on GPUs may otherwise put the products that
    make the gradients of the parameters behind the backward pass of all layers, and their operands, several arrays
    [B, T, D] of each layer, are kept until then: as much as splitting the time saves. A scan over the layers needs no
    such order, because its body ends with the layer.
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
    # The gradients of integers are of a dtype that no operation takes.
    real = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    for i, leaf in zip(real, jax.lax.optimization_barrier([leaves[i] for i in real]), strict=True):
        leaves[i] = leaf
    return (jax.tree.unflatten(structure, leaves),)


_gradients_together.defvjp(_gradients_together_forward, _gradients_together_backward)


def _exchange(x: Array, *, to_heads: bool) -> Array:
    # Both sides are constrained, or XLA would gather inputs whole and multiply them by a share of the projections.
    if not _is_split(x):
        return x
    mesh = jax.sharding.get_abstract_mesh()
    n_batch, _, n_heads = x.shape[:3]
    if n_heads % mesh.shape["seq"]:
        raise UserError(
            f"config.mesh.seq={mesh.shape['seq']} does not divide the {n_heads} heads (or channels) of a mixer, which "
            "its devices share; choose a divisor of the heads of every mixer (those of keys and values, if fewer)."
        )
    batch, tensor = batch_axes(mesh, n_batch), "tensor" if n_heads % mesh.shape["tensor"] == 0 else None
    by_time = PartitionSpec(batch, "seq", tensor)
    by_heads = PartitionSpec(batch, None, head_axes(mesh, n_heads))
    for spec in (by_time, by_heads) if to_heads else (by_heads, by_time):
        x = jax.lax.with_sharding_constraint(x, spec)
    return x


def _is_split(x: Array) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and splits_time(mesh, x.shape[1])
