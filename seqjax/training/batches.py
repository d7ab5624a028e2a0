"""How the sequences of an optimiser step are divided over devices and micro-batches.

The config says how many sequences a step takes over all devices (`train.batch_size`) and, at most, how many a device
takes at a time (`train.per_device_batch_size`). The number of micro-batches follows from these and the mesh, so a
config trains on any number of devices that divides the batch. `train.accumulate` sets that number instead.
"""

from jax.sharding import Mesh

from seqjax.config import TrainConfig
from seqjax.errors import UserError


def batch_shards(mesh: Mesh) -> int:
    """Return the number of parts that a batch is split into. Devices along other mesh axes share a part."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def micro_batches(train: TrainConfig, mesh: Mesh) -> int:
    """Return the number of micro-batches of a step: the smallest one that the limit per device allows.

    All have the same size. Raises `UserError`, which names the nearest batch sizes that fit, if the devices cannot have
    equal parts.
    """
    shards, devices = batch_shards(mesh), f"data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']} devices"
    of_device, left = divmod(train.batch_size, shards)
    nearest = _nearest(train.batch_size, shards * (train.accumulate or 1))
    if left:
        raise UserError(
            f"config.train.batch_size={train.batch_size} sequences cannot be split evenly over {devices}. {nearest} "
            "Or change config.mesh: only data and fsdp divide a batch."
        )
    if train.accumulate is None:
        limit = train.per_device_batch_size or of_device
        return next(n for n in range(-(-of_device // limit), of_device + 1) if of_device % n == 0)
    if of_device % train.accumulate:
        raise UserError(
            f"config.train.accumulate={train.accumulate}: a micro-batch of {train.batch_size // train.accumulate} "
            f"sequences cannot be split evenly over {devices}. Give None, and the number of micro-batches follows from "
            f"the devices and config.train.per_device_batch_size. Or change config.train.batch_size. {nearest}"
        )
    return train.accumulate


def _nearest(batch_size: int, unit: int) -> str:
    below = batch_size // unit * unit
    return f"The nearest that fit are {below} and {below + unit}." if below else f"The nearest that fits is {unit}."


def division(train: TrainConfig, mesh: Mesh) -> str:
    """Return how a step is divided in words: '2 micro-batches of 64 sequences, 8 on each device'."""
    n_micro = micro_batches(train, mesh)
    sequences, parts = train.batch_size // n_micro, "micro-batches" if n_micro > 1 else "micro-batch"
    of_device, limit = sequences // batch_shards(mesh), train.per_device_batch_size
    more = ""
    if limit is not None and of_device > limit:
        more = f": config.train.accumulate={train.accumulate} takes precedence over .per_device_batch_size={limit}"
    return f"{n_micro:,} {parts} of {sequences:,} sequences, {of_device:,} on each device{more}"


def eval_batch_size(given: int | None, train: TrainConfig, mesh: Mesh) -> int:
    """Return the sequences of an evaluation batch: those `given`, or those of a training micro-batch at most.

    It is rounded up to a multiple of the devices, so unlike training, evaluation runs on any number of them.
    """
    shards = batch_shards(mesh)
    if given is None:
        given = train.batch_size // (train.accumulate or 1)
        if train.accumulate is None and train.per_device_batch_size is not None:
            given = min(given, train.per_device_batch_size * shards)
    return -(-given // shards) * shards
