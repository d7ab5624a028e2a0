"""An optimiser step as a pure function, and its layout on devices.

The config sets the sequences per step over all devices (`train.batch_size`), and the largest number of sequences per
device at a time (`train.per_device_batch_size`). The number of micro-batches follows from these and the mesh. A config
therefore trains on any number of devices that divides the batch. `train.accumulate` sets the number of micro-batches
instead.
"""

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from seqjax.config import TrainConfig
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.models.entropy import mean_entropy
from seqjax.nn.params import names
from seqjax.sharding import replicated, shardings
from seqjax.terminal import size
from seqjax.training.schedule import gradient_norms
from seqjax.types import Array, Params, PRNGKey

LONGEST = 60  # characters of a path in the table
TITLES = ("parameter", "shape", "axes", "split over", "per device")


class TrainState(NamedTuple):
    """The training state, or its shapes or shardings; all leaves are plain arrays.

    `rng` is raw key data.
    """

    params: Params
    opt_state: Any
    step: Any  # int32 scalar
    rng: Any  # uint32 [2]


def init_state(model: Model, optimizer: optax.GradientTransformation, key: PRNGKey) -> TrainState:
    """Return a fresh training state.

    Call it under `jax.jit` with output shardings to create the state on the devices.
    """
    params_key, rng = jax.random.split(key)
    params = model.init(params_key)
    step = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(params), step, jax.random.key_data(rng))


def state_shardings(
    mesh: Mesh, model: Model, optimizer: optax.GradientTransformation, shapes: TrainState
) -> TrainState:
    """Return the sharding of each state leaf.

    Moments are sharded like their parameters. An axis that a moment has reduced to 1 is not split.
    """
    by_param, unsharded = shardings(mesh, model.shapes, model.axes), replicated(mesh)
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731 - a parameter that another rule updates

    def of_moment(moment: Any, param: Any, sharding: NamedSharding) -> Any:
        if is_masked(moment):
            return moment
        reduced = [of_moment < of_param for of_moment, of_param in zip(moment.shape, param.shape, strict=True)]
        return NamedSharding(mesh, PartitionSpec(*(None if r else axis for r, axis in zip(reduced, sharding.spec))))

    moments = optax.tree.map_params(
        optimizer,
        of_moment,
        shapes.opt_state,
        model.shapes,
        by_param,
        transform_non_params=lambda _: unsharded,
        is_leaf=is_masked,
    )
    return TrainState(by_param, moments, unsharded, unsharded)


def make_train_step(
    model: Model, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Array, Any], tuple[TrainState, dict[str, Array]]]:
    """Return the function that updates the parameters once.

    It maps (state, tokens int32 [A, B, T + 1], rate float32 []) to (state, metrics). The update applies `optimizer` to
    the mean gradient over A micro-batches, times the learning rate `rate`. `metrics` has scalars: the loss in nats per
    token, the mixers' auxiliary losses, the gradient norms (`gradient_norms`), the norm of the new parameters, and the
    learning rate.
    """

    def losses_and_grads(params: Params, tokens_BT1: Array) -> tuple[dict[str, Array], Params]:
        def objective(params: Params) -> tuple[Array, dict[str, Array]]:
            total, count, auxiliary = model.training_loss(params, tokens_BT1[:, :-1], tokens_BT1[:, 1:])
            loss = total / count
            return sum(auxiliary.values(), loss), {"loss": loss, **auxiliary}

        (_, losses), grads = jax.value_and_grad(objective, has_aux=True)(params)
        return losses, grads

    def train_step(state: TrainState, tokens_ABT1: Array, rate: Any) -> tuple[TrainState, dict[str, Array]]:
        n_micro = tokens_ABT1.shape[0]
        if n_micro == 1:
            losses, grads = losses_and_grads(state.params, tokens_ABT1[0])
        else:

            def body(carry, tokens_BT1):
                return jax.tree.map(jnp.add, carry, losses_and_grads(state.params, tokens_BT1)), None

            no_loss = dict.fromkeys(("loss", *model.auxiliary_losses), jnp.zeros((), jnp.float32))
            zero = (no_loss, jax.tree.map(jnp.zeros_like, state.params))
            sums, _ = jax.lax.scan(body, zero, tokens_ABT1)
            losses, grads = jax.tree.map(lambda x: x / n_micro, sums)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            updates = jax.tree.map(lambda u: u * jnp.asarray(rate, u.dtype), updates)
            params: Any = optax.apply_updates(state.params, updates)
        # The parameter norm is taken after the update, because a finite loss does not imply a finite update.
        metrics = {**losses, **gradient_norms(grads, model.groups), "param_norm": optax.tree.norm(params)}
        metrics["lr"] = jnp.asarray(rate, jnp.float32)
        return TrainState(params, opt_state, state.step + 1, state.rng), metrics

    return train_step


def jit_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    state: TrainState,
    tokens: NamedSharding,
) -> Any:
    """Return `make_train_step` under `jax.jit` with these state and token shardings.

    Tokens are int32 [A, B, T + 1] and the rate is replicated. The input state's buffers are donated to the output
    state. Call it inside `jax.set_mesh`.
    """
    unsharded = replicated(cast(Mesh, tokens.mesh))
    return jax.jit(
        make_train_step(model, optimizer),
        donate_argnums=0,
        in_shardings=(state, tokens, unsharded),
        out_shardings=(state, unsharded),
    )


def make_entropy_step(model: Model) -> Callable[[Params, Array, Array], tuple[Array, Array, Array]]:
    """Return (params, tokens [B, T + 1], weights [B]) -> sums over rows.

    The sums are weighted: both values of `mean_entropy`, and 1.
    """

    def entropy_step(params: Params, tokens_BT1: Array, weights_B: Array) -> tuple[Array, Array, Array]:
        nats_LB, relative_LB = mean_entropy(model, params, tokens_BT1[:, :-1])
        return jnp.mean(nats_LB, 0) @ weights_B, jnp.mean(relative_LB, 0) @ weights_B, jnp.sum(weights_B)

    return entropy_step


# -------------------------------------------------------------------------------------------------- on the devices
def batch_shards(mesh: Mesh) -> int:
    """Return the number of parts that a batch is split into.

    Devices along other mesh axes share a part.
    """
    return mesh.shape["data"] * mesh.shape["fsdp"]


def micro_batches(train: TrainConfig, mesh: Mesh) -> int:
    """Return the smallest number of micro-batches within the limit per device.

    All have the same size. Raises `UserError` with the nearest batch sizes that fit if the devices cannot have equal
    parts.
    """
    shards, devices = batch_shards(mesh), f"data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']} devices"
    per_device, remainder = divmod(train.batch_size, shards)
    nearest = _nearest(train.batch_size, shards * (train.accumulate or 1))
    if remainder:
        raise UserError(
            f"config.train.batch_size={train.batch_size} sequences cannot be split evenly over {devices}: {nearest}. "
            "Choose such a size, or change config.mesh (only data and fsdp divide a batch)."
        )
    if train.accumulate is None:
        limit = train.per_device_batch_size or per_device
        return next(n for n in range(-(-per_device // limit), per_device + 1) if per_device % n == 0)
    if per_device % train.accumulate:
        raise UserError(
            f"config.train.accumulate={train.accumulate}: a micro-batch of {train.batch_size // train.accumulate} "
            f"sequences cannot be split evenly over {devices}. Give None to derive the number of micro-batches "
            f"from config.train.per_device_batch_size and the devices, or change config.train.batch_size ({nearest})."
        )
    return train.accumulate


def _nearest(batch_size: int, unit: int) -> str:
    below = batch_size // unit * unit
    if not below:
        return f"the nearest size that fits is {unit}"
    return f"the nearest sizes that fit are {below} and {below + unit}"


def division(train: TrainConfig, mesh: Mesh) -> str:
    """Describe a step: '2 micro-batches of 64 sequences, 8 on each device'."""
    n_micro = micro_batches(train, mesh)
    sequences, parts = train.batch_size // n_micro, "micro-batches" if n_micro > 1 else "micro-batch"
    per_device, limit = sequences // batch_shards(mesh), train.per_device_batch_size
    note = ""
    if limit is not None and per_device > limit:
        note = f": config.train.accumulate={train.accumulate} takes precedence over .per_device_batch_size={limit}"
    return f"{n_micro:,} {parts} of {sequences:,} sequences, {per_device:,} on each device{note}"


def eval_batch_size(requested: int | None, train: TrainConfig, mesh: Mesh) -> int:
    """Return the sequences per evaluation batch: `requested`, or a micro-batch.

    None means a training micro-batch with at most `train.per_device_batch_size` sequences per device. The result is
    rounded up to a multiple of the devices, so evaluation runs on any number of devices, unlike training.
    """
    shards = batch_shards(mesh)
    if requested is None:
        requested = train.batch_size // (train.accumulate or 1)
        if train.accumulate is None and train.per_device_batch_size is not None:
            requested = min(requested, train.per_device_batch_size * shards)
    return -(-requested // shards) * shards


class Kind(NamedTuple):
    """The common properties of the parameters in one table row, per layer."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical
    split: tuple[str | None, ...]  # the mesh axis of each dimension
    rule: str  # "muon" or "adam" under Muon, else ""


def bytes_per_device(shapes: Any, by_leaf: Any) -> int:
    """Return the bytes per device of an array or shape tree under shardings."""
    sizes = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, shapes, by_leaf)
    return sum(jax.tree.leaves(sizes))


def parameter_table(model: Model, by_param: Params, update_rules: Params | None = None) -> list[str]:
    """Return a parameter table.

    Columns: path, shape, logical axes, mesh axes, size per device, and the optimiser's rule if `update_rules` has each
    parameter's rule. Parameters of one kind share a row. A row covers all layers ("x12" after the path is their number)
    and similar paths ("mixer.{q,k,v}.w"). `by_param` is the tree of shardings.
    """
    axes, shapes = dict(names(model.axes)), dict(names(model.shapes))
    rules = {} if update_rules is None else dict(names(update_rules))
    # (path within a block, kind) -> places in the layer pattern; parameters outside blocks have place "".
    positions: dict[tuple[str, Kind], list[str]] = collections.defaultdict(list)
    n_bytes: dict[tuple[str, str], int] = {}
    for full_path, sharding in names(by_param):
        x, logical, split = shapes[full_path], axes[full_path], _split(sharding, len(axes[full_path]))
        stacked = int(full_path.startswith("blocks."))  # 1 if the first dimension is the layers of a place
        position, path = full_path.split(".", 2)[1:] if stacked else ("", full_path)
        kind = Kind(x.shape[stacked:], logical[stacked:], split[stacked:], rules.get(full_path, ""))
        positions[path, kind].append(position)
        n_bytes[position, path] = bytes_per_device(x, sharding)

    rows: dict[tuple[tuple[str, ...], Kind], list[str]] = collections.defaultdict(list)
    for (path, kind), at_positions in positions.items():
        rows[tuple(at_positions), kind].append(path)
    cells: list[tuple[str, ...]] = [(*TITLES[:-1], *["rule"] * bool(rules), TITLES[-1])]
    for (at_positions, kind), paths in rows.items():
        label = _joined(paths)
        if at_positions != ("",):
            block_label = "*" if len(at_positions) == len(model.blocks) else _braces(at_positions)
            label = f"blocks.{block_label}.{label} x{len(at_positions) * model.repeats}"
        split_axes = ", ".join(axis or "-" for axis in kind.split) if any(kind.split) else "whole"
        total = sum(n_bytes[position, path] for position in at_positions for path in paths)
        cells.append(
            (
                label,
                " x ".join(map(str, kind.shape)),
                ", ".join(name or "-" for name in kind.axes),
                split_axes,
                *[kind.rule] * bool(rules),
                size(total),
            )
        )
    cells.append(("all", *[""] * (len(cells[0]) - 2), size(sum(n_bytes.values()))))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths[:-1])), row[-1].rjust(widths[-1])])
        for row in cells
    ]


def _split(sharding: NamedSharding, n_dimensions: int) -> tuple[str | None, ...]:
    """Return the mesh axis that splits each dimension.

    An axis with one device splits nothing.
    """
    spec = (*sharding.spec, *[None] * n_dimensions)[:n_dimensions]
    return tuple(axis if axis is not None and sharding.mesh.shape[axis] > 1 else None for axis in spec)


def _joined(paths: Sequence[str]) -> str:
    """Return `mixer.{q,k,v}.w` for paths with common ends; abbreviate long lists."""
    parts = [path.split(".") for path in paths]
    n_between = min(map(len, parts)) - 1  # at least one word of each path stays in the braces
    head = next((i for i in range(n_between) if len({p[i] for p in parts}) > 1), n_between)
    tail = next((i for i in range(n_between - head) if len({p[-1 - i] for p in parts}) > 1), n_between - head)
    between = [".".join(p[head : len(p) - tail]) for p in parts]
    text = ""
    for n_shown in range(len(between), 0, -1):
        omitted = [f"{len(between) - n_shown} more"] if n_shown < len(between) else []
        braces = _braces([*between[:n_shown], *omitted])
        text = ".".join([*parts[0][:head], braces, *parts[0][len(parts[0]) - tail :]])
        if len(text) <= LONGEST:
            break
    return text


def _braces(words: Sequence[str]) -> str:
    return "{" + ",".join(words) + "}" if len(words) > 1 else words[0]
