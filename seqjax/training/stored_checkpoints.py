"""Checkpoints as objects of a store that Orbax does not write to: whole directories, copied from and to this machine.

`checksums.json` of a checkpoint (seqjax/training/integrity.py) names every file, and is copied last. A checkpoint
without it does not exist, so whatever a process that dies, or a store that goes away, leaves behind is never read, and
is removed by the next save. The objects are the files that Orbax wrote, so a checkpoint that was copied by other means
is one too.
"""

import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path

from seqjax import store
from seqjax.training import integrity

DIRECTORY = "checkpoints"
MARKER = integrity.FILE
TRIES = 5
OLD_SECONDS = 24 * 3600.0


def complete(names: Iterable[str]) -> list[int]:
    """Return the steps of the complete checkpoints among the objects of a run, in order."""
    found = (re.fullmatch(rf"{DIRECTORY}/(\d+)/{re.escape(MARKER)}", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def local_steps(workdir: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory of this machine; Orbax names them when they are complete."""
    found = (workdir / DIRECTORY).glob("[0-9]*")
    return sorted(int(path.name) for path in found if path.name.isdigit() and (path / MARKER).is_file())


def send(workdir: Path, url: str, step: int) -> None:
    """Copy a checkpoint to the store; raise `StoreError` if it did not get there, and then it does not exist there."""
    directory, target = workdir / DIRECTORY / str(step), f"{url}/{DIRECTORY}/{step}"
    sizes = {p.relative_to(directory).as_posix(): p.stat().st_size for p in directory.rglob("*") if p.is_file()}
    store.remove(f"{target}/{MARKER}")
    for name in store.sizes(target).keys() - sizes.keys():  # of a copy that was broken off
        store.remove(f"{target}/{name}")
    store.in_threads(
        lambda name: store.upload(directory / name, f"{target}/{name}"), [name for name in sizes if name != MARKER]
    )
    there = store.sizes(target)
    if missing := [name for name, size in sizes.items() if name != MARKER and there.get(name) != size]:
        raise store.StoreError(f"{target} lacks {', '.join(sorted(missing)[:3])} although it was sent.")
    store.upload(directory / MARKER, f"{target}/{MARKER}")


def prune(url: str, *, keep: int, keep_period: int | None) -> None:
    """Remove all checkpoints but the newest `keep` and those of steps that `keep_period` divides."""
    names = store.sizes(f"{url}/{DIRECTORY}")
    steps = complete(f"{DIRECTORY}/{name}" for name in names)
    kept = {*steps[-keep:], *(step for step in steps if keep_period and step % keep_period == 0)}
    for step in sorted({int(name.partition("/")[0]) for name in names if name.partition("/")[0].isdigit()} - kept):
        target = f"{url}/{DIRECTORY}/{step}"
        store.remove(f"{target}/{MARKER}")
        own = [name for name in names if name.startswith(f"{step}/")]
        store.in_threads(lambda name: store.remove(f"{url}/{DIRECTORY}/{name}"), own)


def fetch(url: str, step: int, workdir: Path, *, items: Collection[str] = ()) -> None:
    """Copy a checkpoint, or only some of its items, to `workdir`, where it appears when it is complete."""
    target = workdir / DIRECTORY / str(step)
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in workdir.glob(".checkpoint-*.tmp"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > OLD_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    source, temporary = f"{url}/{DIRECTORY}/{step}", workdir / f".checkpoint-{step}.{uuid.uuid4().hex}.tmp"
    names = [name for name in store.sizes(source) if not items or "/" not in name or name.partition("/")[0] in items]
    try:
        store.in_threads(lambda name: store.download(f"{source}/{name}", temporary / name), names)
        temporary.rename(target)
    except OSError:
        if not target.is_dir():  # Another process was not faster.
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fetch_newest(url: str, workdir: Path, *, items: Collection[str]) -> None:
    """Copy the items of the newest checkpoint, if there is one; a run that goes on may remove it meanwhile."""
    for last in (*[False] * TRIES, True):
        steps = complete(f"{DIRECTORY}/{name}" for name in store.sizes(f"{url}/{DIRECTORY}"))
        _keep_newest(workdir, steps)
        if not steps:
            return
        try:
            fetch(url, steps[-1], workdir, items=items)
            return
        except store.StoreError:
            if last or f"{steps[-1]}/{MARKER}" in store.sizes(f"{url}/{DIRECTORY}"):
                raise


def _keep_newest(workdir: Path, steps: list[int]) -> None:
    """Remove copies of checkpoints that are no longer the newest but one, which another process may be reading."""
    for path in (workdir / DIRECTORY).glob("[0-9]*"):
        if int(path.name) not in steps[-2:]:
            shutil.rmtree(path, ignore_errors=True)
