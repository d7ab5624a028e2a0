"""Kill runs at random points and compare their results with uninterrupted runs.

    python -m tests.chaos.kills --kills=50 [--seed=N]

Short runs on blocks, the built-in corpus and a stream, with and without data workers, and `seqjax prepare`, get SIGKILL
while they compile, train, save, evaluate or prepare. They are restarted until they are complete. The phase of a kill
follows from the files at that moment: new rows, an unfinished checkpoint, or a step without its evaluation. Data
workers must end too. The command prints the counts; a difference raises `AssertionError`.
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax

from seqjax.training.evaluate import restore
from tests import support
from tests.data.conftest import command as prepare_command
from tests.data.conftest import contents, write_corpus

STEPS, EVAL_EVERY = 60, 7
TRAINING = ("compilation", "saves", "evaluations", "steps")
PATIENCE = 300.0  # seconds; much longer than a run takes


class Case(NamedTuple):
    """A run's corpus and its number of data workers."""

    corpus: str
    workers: int


CASES = [Case(corpus, workers) for workers in (0, 1) for corpus in ("blocks", "builtin", "stream")]


class Sources(NamedTuple):
    """The directories of the corpora."""

    blocks: Path
    stream: Path
    cache: Path


def make_sources(root: Path) -> Sources:
    """Create small corpora below `root`."""
    return Sources(support.write_blocks(root / "blocks"), write_corpus(root / "stream"), root / "cache")


def arguments(case: Case, sources: Sources, workdir: Path) -> list[str]:
    """Return the command of a run."""
    data = {"data.corpus": case.corpus, "data.workers": case.workers, "data.cache_dir": str(sources.cache)}
    settings = support.run_settings(sources.blocks) | data
    settings["data.path"] = str(sources.stream if case.corpus == "stream" else sources.blocks)
    argument = ",".join(f"{key}={value}" for key, value in settings.items())
    config = support.ROOT / "configs" / "transformer_pp.py"
    return [sys.executable, "-m", "seqjax.main", f"--config={config}:debug,{argument}", f"--workdir={workdir}"]


def fingerprint(workdir: Path) -> tuple[int, str]:
    """Return the newest checkpoint's step and a digest of its parameters."""
    _, _, weights, step, _ = restore(workdir)
    return step, support.digest(jax.device_get(weights))


def assert_equal_runs(workdir: Path, uninterrupted: Path) -> None:
    """Check that all rows, except timings, and all parameters are bit-equal."""
    got, want = support.rows(workdir), support.rows(uninterrupted)
    for a, b in zip(got, want):
        assert a == b, f"first difference at step {b['step']}"
    assert len(got) == len(want)
    assert fingerprint(workdir) == fingerprint(uninterrupted)


def finish(args: list[str]) -> None:
    """Run a command to the end; it must succeed."""
    result = support.run(args, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr


def current_phase(workdir: Path, n_before: int) -> str:
    """Return the phase of a run that started with `n_before` rows."""
    if support.n_rows(workdir) <= n_before:
        return "compilation"
    if any((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*")):
        return "saves"
    rows = support.rows(workdir)
    last = rows[-1] if rows else {"step": 0}
    at_end = last["step"] == STEPS
    return "evaluations" if "train/lr" in last and (last["step"] % EVAL_EVERY == 0 or at_end) else "steps"


def kill(args: list[str], workdir: Path, phase: str, draw: random.Random) -> str:
    """Start a run, kill it in a phase, and return the phase that was hit; "" if the run ended first."""
    rows_before = support.n_rows(workdir)
    log = workdir.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(args, env=support.environment(), cwd=support.ROOT, stderr=file, stdout=file)
    target_row, delay = draw.randint(1, 12), draw.uniform(0, 1.0 if phase == "compilation" else 0.02)
    deadline = time.monotonic() + PATIENCE
    has_begun, start = False, 0
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            if not has_begun:
                has_begun = any(mark in log.read_text(encoding="utf-8") for mark in ("Training ", "Resuming "))
                start = support.n_rows(workdir)  # excludes earlier rows that the resumed run repeats
            elif phase == "compilation" or (
                support.n_rows(workdir) >= start + target_row and current_phase(workdir, start) == phase
            ):
                break
            time.sleep(0.001 if has_begun else 0.02)
        time.sleep(delay)
        workers = children(process.pid)
        phase_hit = current_phase(workdir, min(start, rows_before)) if process.poll() is None else ""
        process.send_signal(signal.SIGKILL)
        status = process.wait(timeout=PATIENCE)
    finally:
        process.kill()
    assert status in (0, -signal.SIGKILL), log.read_text(encoding="utf-8")
    while surviving := [pid for pid in workers if is_running(pid)]:
        assert time.monotonic() < deadline, f"workers outlive a killed run: {surviving}"
        time.sleep(0.05)
    return phase_hit if status else ""


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def is_running(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_training(
    case: Case,
    sources: Sources,
    root: Path,
    uninterrupted: Path,
    *,
    kills: int,
    earlier_hits: Counter[str],
    draw: random.Random,
) -> Counter[str]:
    """Kill runs of a case `kills` times and compare each completed run with the uninterrupted run.

    The next kill targets the phase with the fewest hits, including `earlier_hits` of other cases.
    """
    hits: Counter[str] = Counter()
    for number in itertools.count():
        workdir = root / f"{case.corpus}-{case.workers}-{number}"
        args = arguments(case, sources, workdir)
        while hits.total() < kills:
            phase = min(TRAINING, key=lambda name: earlier_hits[name] + hits[name])
            if phase_hit := kill(args, workdir, phase, draw):
                hits[phase_hit] += 1
            else:
                break
        finish(args)
        assert_equal_runs(workdir, uninterrupted)
        if hits.total() == kills:
            return hits
    raise AssertionError("there is always another number")


def kill_preparation(sources: Sources, root: Path, *, kills: int, draw: random.Random) -> int:
    """Kill `seqjax prepare` at random times and compare its blocks with an uninterrupted preparation."""
    begin = time.monotonic()
    finish(prepare_command(sources.stream, root / "whole", "--workers=2"))
    seconds = time.monotonic() - begin
    expected, hits = contents(root / "whole"), 0
    for number in itertools.count():
        args = prepare_command(sources.stream, root / f"killed-{number}", "--workers=2")
        while hits < kills:
            process = subprocess.Popen(args, env=support.environment(), cwd=support.ROOT, stderr=subprocess.DEVNULL)
            time.sleep(draw.uniform(0.3, 1.0) * seconds)
            process.send_signal(signal.SIGKILL)
            if process.wait(timeout=PATIENCE) == 0:
                break
            hits += 1
        finish(args)
        assert contents(root / f"killed-{number}") == expected
        if hits == kills:
            return hits
    raise AssertionError("there is always another number")


def sweep(root: Path, *, kills: int, seed: int, cases: list[Case] = CASES) -> Counter[str]:
    """Kill `kills` times, a sixth of them `seqjax prepare`; return the counts by phase."""
    draw = random.Random(seed)
    sources = make_sources(root)
    total: Counter[str] = Counter()
    remaining = kills - max(1, kills // 6)
    for number, case in enumerate(cases):
        share = remaining // (len(cases) - number)
        remaining -= share
        uninterrupted = root / f"alone-{case.corpus}-{case.workers}"
        finish(arguments(case, sources, uninterrupted))
        hits = kill_training(case, sources, root, uninterrupted, kills=share, earlier_hits=total, draw=draw)
        sys.stdout.write(f"{case.corpus}, {case.workers} workers: {dict(hits)}: equal\n")
        sys.stdout.flush()
        total += hits
    total["preparation"] = kill_preparation(sources, root, kills=max(1, kills // 6), draw=draw)
    return total


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", default=50, type=int)
    parser.add_argument("--seed", default=random.SystemRandom().randrange(10**6), type=int)
    args = parser.parse_args()
    # Without a cache directory in the environment, each start compiles its programs again.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.stdout.write(f"seed {args.seed}\n")
    with tempfile.TemporaryDirectory(prefix="seqjax-kills-") as root:
        total = sweep(Path(root), kills=args.kills, seed=args.seed)
    sys.stdout.write(f"{total.total()} kills, every run equal: {dict(total)}\n")


if __name__ == "__main__":
    main()
