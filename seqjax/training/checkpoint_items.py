"""What a checkpoint holds, as Orbax is asked to write and to read it.

A run saves the items `params`, `rest` (optimiser, step and RNG), `data` (the place in the data, a file per process) and
`meta` (JSON: the state of the log and the identity of the data); `seqjax convert` saves `params` alone.
"""

import json
from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp
from etils import epath

from seqjax.data.pipeline import TrainIterator
from seqjax.errors import UserError
from seqjax.training.integrity import DamagedError
from seqjax.training.step import TrainState
from seqjax.types import Params


def to_save(state: TrainState, iterator: TrainIterator, meta: dict[str, Any]) -> ocp.args.Composite:
    """Return the items from which a run resumes."""
    return ocp.args.Composite(
        params=ocp.args.StandardSave(state.params),
        rest=ocp.args.StandardSave(state._replace(params=())),
        data=grain.checkpoint.CheckpointSave(iterator),
        meta=ocp.args.JsonSave(meta),
    )


def to_restore(state: TrainState, iterator: TrainIterator) -> ocp.args.Composite:
    """Return the same items to read; `state` gives shapes and shardings. A global place is left to `global_place`."""
    return ocp.args.Composite(
        params=ocp.args.StandardRestore(_abstract(state.params)),
        rest=ocp.args.StandardRestore(_abstract(state._replace(params=()))),
        meta=ocp.args.JsonRestore(),
        **({} if iterator.is_global else {"data": grain.checkpoint.CheckpointRestore(iterator)}),
    )


def params_to_save(params: Params) -> ocp.args.Composite:
    """Return parameters alone."""
    return ocp.args.Composite(params=ocp.args.StandardSave(params))


def params_to_restore(params: Params) -> ocp.args.Composite:
    """Return parameters alone to read; `params` gives shapes and shardings."""
    return ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(params)))


def global_place(checkpoint: Path | epath.Path) -> dict[str, Any]:
    """Return the place in the data that process 0 saved, which is that of all however many there were.

    Raises `DamagedError` if there is none.
    """
    paths = list((checkpoint / "data").glob("process_0-of-*.json"))
    if len(paths) != 1:
        raise DamagedError("the item 'data' has no place in the data")
    return json.loads(paths[0].read_bytes())


def require_as_many_processes(checkpoint: Path | epath.Path) -> None:
    """Raise `UserError` if another number of processes saved their places in the data, each its own."""
    names = [path.name for path in (checkpoint / "data").glob("process_0-of-*.json")]
    saved, now = "".join(names).removeprefix("process_0-of-").removesuffix(".json"), jax.process_count()
    if saved.isdecimal() and int(saved) != now:
        workdir = checkpoint.parent.parent
        raise UserError(
            f"{workdir}: number of processes {saved} -> {now}. Each process of a stream reads shards of its own, so a "
            f"place in the data belongs to their number. Give {saved} again; or prepare the text as blocks (`seqjax "
            "prepare`), on which a run goes on with any number, and start a new --workdir."
        )


def _abstract(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
