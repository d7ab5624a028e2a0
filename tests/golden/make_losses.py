"""Makes losses.json: what a few steps of every config write into metrics.jsonl, at the debug size on one CPU device.

    python -m tests.golden.make_losses [NAME ...]           writes losses.json anew, or only these cases of it
    python -m tests.golden.make_losses --check [NAME ...]   compares bit by bit; exit status 1 where something differs
    python -m tests.golden.make_losses --spread [NAME ...]  how far rounding alone moves them: other compiler flags

Each run is `python -m seqjax.main --config=FILE.py:TEXT` on the blocks of blocks.zip: six steps with a learning rate
that moves every parameter by more than it started with, all domains evaluated after three steps and after six. Seeds
are not the defaults, so that one that is ignored shows.

Bits are the same on one machine with the same versions and XLA_FLAGS, all of which the file records. Elsewhere sums are
taken in another order; `TOLERANCE` says what tests/end_to_end/test_golden_losses.py allows, and why.
"""

import argparse
import importlib.metadata
import json
import math
import platform
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.golden import commands

HERE = Path(__file__).parent
LOSSES = HERE / "losses.json"
TIMING = ("tokens_per_s", "mfu", "seconds", "device_peak_gib")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")
SETTINGS = {
    "data.corpus": "blocks",
    "data.seed": 2,
    "train.seed": 3,
    "train.seq_len": 136,  # longer than every default chunk and window at this size, and a multiple of none
    "train.steps": 6,
    "optim.lr": 0.01,
    "optim.warmup_steps": 2,
    "eval.every": 3 * 4 * 136,
    "eval.tokens": 20 * 136,  # every block there is, so that it does not matter which would be chosen
    "checkpoint.every": 0,
    "log.every": 1,
    "log.tensorboard": False,
    "log.sample_tokens": 0,
}
# Relative. `--spread` moves losses and norms by at most 2.8e-6 (Top-1 Chunk, RWKV-7, Mamba-2 and its decays; SSE4.2 for
# AVX-512 and optimised code for code that is not). Thirty times that leaves room for other products of matrices and
# another jaxlib. Architectures differ by more: RoPE from no positions at all by 1.6e-3, exact from approximate
# selection by 1.2e-2, the nearest two pairs of cases.
TOLERANCE = 1e-4
# MesaNet's conjugate gradients amplify rounding: `--spread` moves its norms by 3.8e-2, and by 6.5e-4 with an epsilon of
# 1e-3.
LEFT_OUT = {"mesa_net"}
# Beside the config files as they are, or in place of one: NAME -> FILE.py:TEXT
HYBRID = (
    '({"name":"rwkv7","heads":2,"decay_rank":4,"eta_rank":4,"value_rank":4,"gate_rank":4,"chunk_size":32},'
    '{"name":"rwkv7_shell","heads":2,"core":"top1_approx","rope_base":1e6,"chunk_size":16,"value_rank":4,"gate_rank":4})'
)
VARIANTS = {
    # Adam's first step divides each entry of a gradient by itself, be it rounding alone, and a state without decay
    # takes such steps to 7e-4 of the norms; a larger epsilon leaves them out.
    "ablations/mamba2_no_decay": "configs/ablations/mamba2_no_decay.py:debug,optim.eps=1e-4",
    # The same for DSA's index: the default epsilon moves its loss by 2.3e-4.
    "dsa": "configs/dsa.py:debug,optim.eps=1e-4",
    "ablations/window": "configs/ablations/window.py:32,debug",  # the default is wider than the sequence
    "top1_chunk approx": "configs/top1_chunk.py:debug,model.mixer.selection=approx",
    "top1_chunk accumulate": "configs/top1_chunk.py:debug,train.accumulate=2,model.scan_layers=False,model.remat=full",
    "top1_element soft": "configs/top1_element.py:debug,model.mixer.v_grad=soft,model.mixer.kv_heads=1",
    "transformer_pp untied": "configs/transformer_pp.py:debug,model.tie_embeddings=False,model.mixer.qk_norm=True,"
    "optim.weight_decay=0.1,optim.final_lr=0.002,optim.clip_norm=0.5,"
    "data.train_domains=('c4','commoncrawl'),data.weights=(0.7,0.3)",
    "transformer_pp mixed": "configs/transformer_pp.py:debug,mixed,model.mixer.window=7,model.mixer.kv_heads=1",
    "rwkv7_shell window": "configs/rwkv7_shell.py:debug,model.mixer.core=window,model.mixer.window=7",
    "hybrid": f"configs/rwkv7.py:debug,model.n_layers=4,model.mixer={HYBRID}",
    "hybrid attention": "configs/transformer_pp.py:debug,model.n_layers=4,model.mixer="
    '({"name":"mamba2","head_dim":32,"state":16,"chunk_size":32},{"name":"top1_chunk","heads":2,"chunk_size":16})',
}


def cases() -> dict[str, str]:
    """What is trained: NAME -> FILE.py:TEXT, without what all have in common."""
    found = {}
    for folder in ("configs", "configs/ablations"):
        for path in sorted((commands.ROOT / folder).glob("*.py")):
            if path.stem not in {"__init__"} | LEFT_OUT:
                found[f"{folder}/{path.stem}".removeprefix("configs/")] = f"{folder}/{path.name}:debug"
    return found | VARIANTS


def unpack_blocks(directory: Path) -> Path:
    """The blocks of blocks.zip in `directory`."""
    with zipfile.ZipFile(HERE / "blocks.zip") as file:
        file.extractall(directory)
    return directory


def training(text: str, workdir: Path, **settings: Any) -> list[str]:
    """The command that trains FILE.py:TEXT with further settings, dotted keys with `__` for the dot."""
    values = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return ["seqjax.main", f"--config={','.join([text, *values])}", f"--workdir={workdir}"]


def read_rows(workdir: Path) -> list[dict[str, Any]]:
    """`metrics.jsonl` without what depends on the clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING} for line in lines]


def measure(names: Iterable[str], *, flags: str = commands.XLA_FLAGS, jobs: int = 1) -> dict[str, list[dict[str, Any]]]:
    """The rows of each case, without bits per byte: they have tests/training/test_evaluate.py."""
    names = list(names)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        blocks = unpack_blocks(root / "blocks")
        settings = {key.replace(".", "__"): value for key, value in SETTINGS.items()} | {"data__path": blocks}
        runs = [root / str(i) for i in range(len(names))]
        commands.run_each(
            [training(cases()[name], run, **settings) for name, run in zip(names, runs, strict=True)],
            flags=flags,
            jobs=jobs,
            timeout=max(550, 300 * len(names)),
        )
        return {
            name: [{k: v for k, v in row.items() if not k.endswith("bits_per_byte")} for row in read_rows(run)]
            for name, run in zip(names, runs, strict=True)
        }


def differences(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """What differs between two lists of rows and by which part of the wanted value; inf where it is another thing.

    Rows may have got fields since; those that were recorded must be there.
    """
    if [row.get("step") for row in got] != [row["step"] for row in want]:
        return [("other rows", math.inf)]
    if missing := {field for a, b in zip(got, want, strict=True) for field in b.keys() - a.keys()}:
        return [(f"missing: {', '.join(sorted(missing))}", math.inf)]
    found = []
    for a, b in zip(got, want, strict=True):
        for field, value in b.items():
            if a[field] != value:
                exact = isinstance(value, int) or not value
                off = math.inf if exact else abs(a[field] - value) / abs(value)
                found.append((f"step {b['step']} {field}: {a[field]!r}, not {value!r}", off))
    return found


def beyond_tolerance(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> list[str]:
    """What differs by more than rounding explains."""
    return [text for text, off in differences(got, want) if not off <= TOLERANCE]


def origin() -> dict[str, Any]:
    """What decides the bits."""
    return {
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "machine": platform.machine(),
        "xla_flags": commands.XLA_FLAGS,
    }


def read() -> dict[str, Any]:
    """What losses.json holds."""
    return json.loads(LOSSES.read_text())


def write(value: dict[str, Any]) -> None:
    """A row per line."""
    text = json.dumps({**value, "losses": {}}, indent=1).removesuffix("{}\n}")
    entries = []
    for name in sorted(value["losses"]):
        rows = ",\n".join("   " + json.dumps(row) for row in value["losses"][name])
        entries.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
    LOSSES.write_text(text + "{\n" + ",\n".join(entries) + "\n }\n}\n")


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases; all where none is named")
    parser.add_argument("--check", action="store_true", help="compare bit by bit")
    parser.add_argument("--spread", action="store_true", help="compare under other compiler flags")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    names = args.names or list(cases())
    if args.check or args.spread:
        return report(names, spread=args.spread, jobs=args.jobs)
    measured = measure(names, jobs=args.jobs)
    kept = read()["losses"] if args.names and LOSSES.exists() else {}
    write({**origin(), "losses": kept | measured})
    return 0


# Other roundings: LLVM with optimisation, which contracts and reorders, for this processor and for a far older one.
FLAGS = {
    "optimised": commands.XLA_FLAGS.replace("level=0", "level=3"),
    "optimised, SSE4.2": commands.XLA_FLAGS.replace("level=0", "level=3") + " --xla_cpu_max_isa=SSE4_2",
}


def report(names: list[str], *, spread: bool, jobs: int) -> int:
    """Print what differs from losses.json; 1 where bits do and should not."""
    golden = read()
    if not spread and origin() != {key: golden[key] for key in origin()}:
        sys.stdout.write(f"made under {[golden[key] for key in origin()]}, this is {list(origin().values())}\n")
    status = 0
    for label, flags in (FLAGS if spread else {"same flags": commands.XLA_FLAGS}).items():
        for name, rows in measure(names, flags=flags, jobs=jobs).items():
            found = differences(rows, golden["losses"][name])
            status |= bool(found) and not spread
            worst = max(found, key=lambda item: item[1], default=("bit-equal", 0.0))
            count = sum("eval/" not in text for text, _ in found)
            numbers = f"{count:3d} of training and {len(found) - count:3d} of evaluation differ"
            sys.stdout.write(f"{label:18s} {name:32s} {numbers}, most {worst[1]:.1e} {worst[0]}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
