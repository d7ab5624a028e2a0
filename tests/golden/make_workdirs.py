"""Makes workdirs/NAME.zip and workdirs.json: tiny runs stopped half way, and what they gave when they went on.

    python -m tests.golden.make_workdirs [NAME ...]           makes them anew, or only these
    python -m tests.golden.make_workdirs --check [NAME ...]   what the code makes of them, bit by bit

An archive keeps what goes on from step 3 of 6: config.json, metrics.jsonl as far as it was then, run.json and the
checkpoint of step 3; the imported one holds the checkpoint of step 0 that `python -m seqjax.convert import` wrote. They
are evidence of how runs were once written. Do not make them anew because code changed: the code must read them. Where a
format or the name of a parameter has to change, the old ones stay here and load through an upgrade. Only TEXT may
follow what the command line takes.

workdirs.json says of each, as the code that wrote it gave it: `command`, the run; `evaluation`, losses of step 3 (0) on
the blocks of blocks.zip; `text`, a continuation that was sampled; and of those that can go on `rows`, what the whole
run wrote, never interrupted. The blocks lie where they are unpacked, so `data.path` in config.json says BLOCKS and is
replaced first (`unpack`).

The built-in corpus follows the versions of the installed packages, so a run on it goes on only where it was made.
Its archive is evaluated on blocks instead, by way of its config.json, and generated from.
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
TINY = {"model.dim": 8, "model.n_layers": 2, "model.mlp.dim": 12} | make_losses.SETTINGS
STOPPED = 3  # of six steps
HYBRID = (
    '({"name":"rwkv7_shell","heads":2,"core":"top1_approx","rope_base":1e6,"chunk_size":16,"value_rank":2,"gate_rank":2},'
    '{"name":"rwkv7","heads":2,"decay_rank":2,"eta_rank":2,"value_rank":2,"gate_rank":2,"chunk_size":32})'
)
# NAME -> FILE.py:TEXT, with what is not in TINY.
RUNS = {
    "blocks": "configs/transformer_pp.py:debug,model.mixer.bias=True",
    "approx": "configs/top1_chunk.py:debug,model.mixer.selection=approx",
    "hybrid": f"configs/rwkv7.py:debug,model.mixer={HYBRID}",
    "mamba2": "configs/mamba2.py:debug,model.mixer.head_dim=8,model.mixer.state=4,model.mlp.dim=None",
    "rwkv6": "configs/rwkv6.py:debug,model.mixer.head_dim=4,model.mixer.shift_rank=2,model.mixer.decay_rank=2,"
    "model.mlp.dim=None",
    "gated_deltanet": "configs/gated_deltanet.py:debug",
    "mamba1": "configs/mamba1.py:debug,model.mixer.state=4,model.mlp.dim=None",
    "based": "configs/based.py:debug,model.n_layers=5",
    "builtin": "configs/top1_element.py:debug,data.corpus=builtin,data.path=",
}
CONVERTED = (
    "configs/transformer_pp.py:debug,model.vocab_size=264,model.dim=24,model.n_layers=3,model.mixer.heads=4,"
    "model.mixer.kv_heads=2,model.mlp.dim=40,model.mlp.kind=swiglu,model.norm_eps=1e-6,model.mixer.rope_base=5e4,"
    "model.tie_embeddings=False"
)
NAMES = (*RUNS, "converted")
# Those that are there for the names of their parameters; their checkpoints are cut down to parameters, a third in size.
PARAMETERS_ONLY = ("rwkv6", "gated_deltanet", "mamba1", "based")
GO_ON = tuple(name for name in NAMES if name not in (*PARAMETERS_ONLY, "builtin"))


def text_of(name: str, blocks: str) -> str:
    """FILE.py:TEXT with every setting of the run; later settings win, so a run's own come last."""
    file, _, own = (RUNS.get(name) or CONVERTED).partition(":")
    size, _, own = own.partition(",")
    common = make_losses.SETTINGS if name == "converted" else TINY
    shared = ",".join(f"{key}={value}" for key, value in {**common, "data.path": blocks, "checkpoint.every": 3}.items())
    return f"{file}:{size},{shared},{own}".removesuffix(",")


def training(name: str, workdir: Path, blocks: Path) -> list[str]:
    """The command that starts a run or goes on with it."""
    return ["seqjax.main", f"--config={text_of(name, str(blocks))}", f"--workdir={workdir}"]


def unpack(name: str, workdir: Path, blocks: Path) -> Path:
    """The archive's files as a workdir, its data where `blocks` lie."""
    with zipfile.ZipFile(HERE / "workdirs" / f"{name}.zip") as file:
        file.extractall(workdir)
    path = workdir / "config.json"
    path.write_text(path.read_text().replace(f'"{PLACE}"', json.dumps(str(blocks))))
    return workdir


def on_blocks(workdir: Path, blocks: Path) -> None:
    """Let a run on the built-in corpus be evaluated on blocks."""
    path = workdir / "config.json"
    config = json.loads(path.read_text())
    config["data"] |= {"corpus": "blocks", "path": str(blocks)}
    path.write_text(json.dumps(config))


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


def make(names: list[str], jobs: int) -> dict[str, Any]:
    """Train, cut back to step 3, pack, and look at what was packed."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        blocks = make_losses.unpack_blocks(root / "blocks")
        whole = {name: root / "whole" / name for name in names}
        imported = root / "imported"
        if "converted" in names:
            weights = HERE / "convert" / "llama" / "model.safetensors"
            text = text_of("converted", str(blocks))
            arguments = ["import", f"--weights={weights}", f"--config={text}", f"--workdir={imported}"]
            commands.run_each([["seqjax.convert", *arguments]])
            shutil.copytree(imported, whole["converted"])
        commands.run_each([training(name, whole[name], blocks) for name in names], jobs=jobs, timeout=1800)
        for name in names:
            pack(imported if name == "converted" else whole[name], name, blocks, root / "packed" / name)
        return {
            name: {
                "command": f"--config={text_of(name, PLACE)}",
                **({"rows": make_losses.read_rows(whole[name])} if name in GO_ON else {}),
                **seen,
            }
            for name, seen in look(names, blocks, root / "seen", jobs=jobs).items()
        }


def pack(workdir: Path, name: str, blocks: Path, copy: Path) -> None:
    """Keep what step 3 had, and pack it."""
    shutil.copytree(workdir, copy)
    config = copy / "config.json"
    config.write_text(config.read_text().replace(json.dumps(str(blocks)), f'"{PLACE}"'))
    dropped = [copy / "checkpoints" / "6", *copy.glob("report.*")]
    if name in PARAMETERS_ONLY:
        dropped += [copy / "checkpoints" / str(STOPPED) / item for item in ("rest", "data", "meta")]
    for path in dropped:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    metrics = copy / "metrics.jsonl"
    if metrics.exists():
        lines = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= STOPPED))
    (HERE / "workdirs").mkdir(exist_ok=True)
    make_blocks.pack(copy, HERE / "workdirs" / f"{name}.zip")


def look(names: list[str], blocks: Path, root: Path, *, jobs: int = 1, run=commands.run_each) -> dict[str, Any]:
    """Losses and text of the archives as they are; `run` runs the commands."""
    workdirs = {name: unpack(name, root / name, blocks) for name in names}
    if "builtin" in names:
        on_blocks(workdirs["builtin"], blocks)
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
) -> dict[str, list[dict[str, Any]]]:
    """The rows of runs that go on from their archives to the end; `run` runs the commands."""
    workdirs = {name: unpack(name, root / name, blocks) for name in names}
    run([training(name, workdirs[name], blocks) for name in names], jobs=jobs, timeout=1800)
    return {name: make_losses.read_rows(workdirs[name]) for name in names}


def main() -> int:
    """Make or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; all where none is named")
    parser.add_argument("--check", action="store_true", help="compare bit by bit")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    names = args.names or list(NAMES)
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
        rows = go_on([name for name in names if name in GO_ON], blocks, root / "go_on", jobs=jobs)
    for name in names:
        found = [key for key, value in seen[name].items() if value != golden[name][key]]
        if name in rows:
            found += [text for text, _ in make_losses.differences(rows[name], golden[name]["rows"])]
        status |= bool(found)
        sys.stdout.write(f"{name:16s} {'bit-equal' if not found else '; '.join(found[:3])}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
