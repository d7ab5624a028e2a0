"""Makes workdirs/NAME.zip and workdirs.json: tiny runs stopped half way, and what they gave when they went on.

    python -m tests.golden.make_workdirs [NAME ...]           makes them anew, or only these
    python -m tests.golden.make_workdirs --check [NAME ...]   what the code makes of them, bit by bit

The archives are of the format that seqjax 0.1.0 reads and every later version keeps reading: config.json, metrics and
block losses as far as they were then, run.json and checkpoints. Do not make them anew because code changed: the code
must read them. `plain` is a run with one linear decay, cut back to step 3 of 6. `ends` is a trunk with two ends, cut
back to step 3 of 12, when the first of its cooldowns had ended at step 6. `decay` was written before run.json named
rules (seqjax/training/origin.py): its weight decay applies to every array with more than one axis, tables included.

workdirs.json says of each, as the code that wrote it gave it: `command`, the run; `evaluation`, losses on the blocks
of blocks.zip of the checkpoint that stands for it; `text`, a continuation that was sampled; and `rows`, what the whole
run wrote in each of its directories, never interrupted. The blocks lie where they are unpacked, so `data.path` in
config.json says BLOCKS and is replaced first (`unpack`).
"""

import argparse
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tests.golden import commands, make_blocks, make_losses

HERE = Path(__file__).parent
EXPECTED = HERE / "workdirs.json"
PLACE = "BLOCKS"
PROMPT = "abc de"
STOPPED = 3  # the step that the workdir itself is cut back to
NEWEST = {"plain": 3, "ends": 6, "decay": 3}  # NAME -> the step of the checkpoint that stands for the run
SHARED = make_losses.SETTINGS | {"model.dim": 8, "model.n_layers": 1, "model.mlp.dim": 12, "checkpoint.every": STOPPED}
# NAME -> what is not in SHARED. The trunk of `ends` branches after steps 3 and 6, to the ends after 6 and 12.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ends": {"train.steps": 12, "train.ends": (0.5, 1.0), "optim.cooldown": 0.5, "checkpoint.ends": "all"},
    "decay": {"optim.weight_decay": 0.3, "model.learned_positions": True},
}


def text_of(name: str, blocks: str) -> str:
    """FILE.py:TEXT with every setting of the run."""
    settings = {**SHARED, "data.path": blocks, **RUNS[name]}
    return ",".join(["configs/transformer_pp.py:debug", *(f"{key}={value}" for key, value in settings.items())])


def training(name: str, workdir: Path, blocks: Path) -> list[str]:
    """The command that starts a run or goes on with it."""
    return ["seqjax.main", f"--config={text_of(name, str(blocks))}", f"--workdir={workdir}"]


def unpack(name: str, workdir: Path, blocks: Path) -> Path:
    """The archive's files as a workdir, its data where `blocks` lie."""
    with zipfile.ZipFile(HERE / "workdirs" / f"{name}.zip") as file:
        file.extractall(workdir)
    _replace(workdir, PLACE, str(blocks))
    return workdir


def looks(workdir: Path) -> list[list[str]]:
    """The commands that look at a checkpoint: losses per domain, a sampled continuation."""
    generation = [f"--prompt={PROMPT}", "--max_new_tokens=24", "--temperature=0.5", "--top_k=20", "--seed=1"]
    return [
        ["seqjax.evaluate", f"--workdir={workdir}"],
        ["seqjax.generate", f"--workdir={workdir}", *generation],
    ]


def read() -> dict[str, Any]:
    """What workdirs.json holds."""
    return json.loads(EXPECTED.read_text())


def rows(workdir: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of a run, by the directory in the workdir."""
    found = sorted(path.parent for path in workdir.rglob("metrics.jsonl"))
    return {path.relative_to(workdir).as_posix(): make_losses.read_rows(path) for path in found}


def make(names: list[str], jobs: int) -> dict[str, Any]:
    """Train, cut back, pack, and look at what was packed."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        blocks = make_losses.unpack_blocks(root / "blocks")
        whole = {name: root / "whole" / name for name in names}
        commands.run_each([training(name, whole[name], blocks) for name in names], jobs=jobs, timeout=1800)
        for name in names:
            pack(whole[name], name, blocks, root / "packed" / name)
        return {
            name: {"command": f"--config={text_of(name, PLACE)}", "rows": rows(whole[name]), **seen}
            for name, seen in look(names, blocks, root / "seen", jobs=jobs).items()
        }


def pack(workdir: Path, name: str, blocks: Path, copy: Path) -> None:
    """Keep what there was when the first cooldown, if there is one, had ended, and pack it."""
    shutil.copytree(workdir, copy)
    _replace(copy, str(blocks), PLACE)
    dropped = [*copy.glob("report.*"), *copy.glob("eval_losses/classes.npz")]
    dropped += [path for path in copy.glob("checkpoints/*") if int(path.name) > STOPPED]
    dropped += [path for path in copy.glob("eval_losses/0*.npz") if int(path.stem) > STOPPED]
    dropped += [path for path in copy.glob("ends/*") if int(path.name) > NEWEST[name]]
    for path in dropped:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    metrics = copy / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= STOPPED))
    (HERE / "workdirs").mkdir(exist_ok=True)
    make_blocks.pack(copy, HERE / "workdirs" / f"{name}.zip")


def _replace(workdir: Path, old: str, new: str) -> None:
    """Let the data of a run and of its ends be elsewhere."""
    for path in workdir.rglob("config.json"):
        path.write_text(path.read_text().replace(json.dumps(old), json.dumps(new)))


def look(names: list[str], blocks: Path, root: Path, *, jobs: int = 1, run=commands.run_each) -> dict[str, Any]:
    """Losses and text of the archives as they are; `run` runs the commands."""
    workdirs = {name: unpack(name, root / name, blocks) for name in names}
    todo = [command for name in names for command in looks(workdirs[name])]
    results = run(todo, jobs=jobs, timeout=1800)
    return {
        name: {
            "evaluation": json.loads((workdirs[name] / "evaluation.json").read_text()),
            "text": results[2 * i + 1].stdout,
        }
        for i, name in enumerate(names)
    }


def go_on(
    names: list[str], blocks: Path, root: Path, *, jobs: int = 1, run=commands.run_each
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The rows of runs that go on from their archives to the end; `run` runs the commands."""
    workdirs = {name: unpack(name, root / name, blocks) for name in names}
    run([training(name, workdirs[name], blocks) for name in names], jobs=jobs, timeout=1800)
    return {name: rows(workdirs[name]) for name in names}


def main() -> int:
    """Make or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; all where none is named")
    parser.add_argument("--check", action="store_true", help="compare bit by bit")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    names = args.names or list(RUNS)
    if args.check:
        return check(names, args.jobs)
    kept = read()["workdirs"] if args.names and EXPECTED.exists() else {}
    content = {**make_losses.origin(), "workdirs": kept | make(names, args.jobs)}
    EXPECTED.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def check(names: list[str], jobs: int) -> int:
    """Print what differs; 1 where something does."""
    golden, status = read()["workdirs"], 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        blocks = make_losses.unpack_blocks(root / "blocks")
        seen = look(names, blocks, root / "look", jobs=jobs)
        went_on = go_on(names, blocks, root / "go_on", jobs=jobs)
    for name in names:
        found = [f"another {key}" for key in ("evaluation", "text") if not _holds(seen[name][key], golden[name][key])]
        found += [] if went_on[name].keys() == golden[name]["rows"].keys() else ["other directories"]
        for directory, wanted in golden[name]["rows"].items():
            found += [text for text, _ in make_losses.differences(went_on[name].get(directory, []), wanted)]
        status |= bool(found)
        sys.stdout.write(f"{name:16s} {'bit-equal' if not found else '; '.join(found[:3])}\n")
    return status


def _holds(found: Any, wanted: Any) -> bool:
    """Whether it is the same; what was measured may have got fields since."""
    return found == wanted if not isinstance(wanted, dict) else all(found.get(key) == x for key, x in wanted.items())


if __name__ == "__main__":
    sys.exit(main())
