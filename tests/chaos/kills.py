"""Kills runs at random points and compares what they end as with runs that were left alone.

    python -m tests.chaos.kills --kills=50 [--seed=N]

Runs of seconds on blocks, the built-in corpus and a stream, with and without data workers, and `seqjax prepare`, are
sent SIGKILL while they compile, train, save, evaluate and prepare, and are started again until they are done. Where a
kill hit is read from what was there at that moment: a row since the start, an unfinished checkpoint, a step whose
evaluation is missing. Workers must end as well. The counts are printed; a difference is an `AssertionError`.
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
PATIENCE = 300.0  # seconds; far longer than it takes


class Case(NamedTuple):
    """What a run reads and how."""

    corpus: str
    workers: int


CASES = [Case(corpus, workers) for workers in (0, 1) for corpus in ("blocks", "builtin", "stream")]


class Sources(NamedTuple):
    """Directories of the corpora, by what they are."""

    blocks: Path
    stream: Path
    cache: Path


def make_sources(root: Path) -> Sources:
    """Small corpora below `root`."""
    return Sources(support.write_blocks(root / "blocks"), write_corpus(root / "stream"), root / "cache")


def arguments(case: Case, sources: Sources, workdir: Path) -> list[str]:
    """The command of a run."""
    data = {"data.corpus": case.corpus, "data.workers": case.workers, "data.cache_dir": str(sources.cache)}
    settings = support.run_settings(sources.blocks) | data
    settings["data.path"] = str(sources.stream if case.corpus == "stream" else sources.blocks)
    argument = ",".join(f"{key}={value}" for key, value in settings.items())
    config = support.ROOT / "configs" / "transformer_pp.py"
    return [sys.executable, "-m", "seqjax.main", f"--config={config}:debug,{argument}", f"--workdir={workdir}"]


def fingerprint(workdir: Path) -> tuple[int, str]:
    """Step and parameters of the newest checkpoint."""
    _, _, weights, step, _ = restore(workdir)
    return step, support.digest(jax.device_get(weights))


def assert_equal_runs(workdir: Path, alone: Path) -> None:
    """Every row, bit for bit, but what depends on the clock; and every parameter."""
    got, want = support.rows(workdir), support.rows(alone)
    for a, b in zip(got, want):
        assert a == b, f"first difference at step {b['step']}"
    assert len(got) == len(want)
    assert fingerprint(workdir) == fingerprint(alone)


def finish(args: list[str]) -> None:
    """Run to the end."""
    result = support.run(args, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr


def is_at(workdir: Path, n_before: int) -> str:
    """What a run that began with so many rows is doing."""
    if support.n_rows(workdir) <= n_before:
        return "compilation"
    if any((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*")):
        return "saves"
    rows = support.rows(workdir)
    last = rows[-1] if rows else {"step": 0}
    at_end = last["step"] == STEPS
    return "evaluations" if "train/lr" in last and (last["step"] % EVAL_EVERY == 0 or at_end) else "steps"


def kill(args: list[str], workdir: Path, phase: str, draw: random.Random) -> str:
    """Start a run, kill it in a phase, and return the one that was hit; "" if the run ended before."""
    before = support.n_rows(workdir)
    log = workdir.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(args, env=support.environment(), cwd=support.ROOT, stderr=file, stdout=file)
    wanted_row, delay = draw.randint(1, 12), draw.uniform(0, 1.0 if phase == "compilation" else 0.02)
    deadline = time.monotonic() + PATIENCE
    begun, start = False, 0
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            if not begun:
                begun = any(mark in log.read_text(encoding="utf-8") for mark in ("Training ", "Resuming "))
                start = support.n_rows(workdir)  # without the rows of before that are written again
            elif phase == "compilation" or (
                support.n_rows(workdir) >= start + wanted_row and is_at(workdir, start) == phase
            ):
                break
            time.sleep(0.001 if begun else 0.02)
        time.sleep(delay)
        workers = children(process.pid)
        hit = is_at(workdir, min(start, before)) if process.poll() is None else ""
        process.send_signal(signal.SIGKILL)
        status = process.wait(timeout=PATIENCE)
    finally:
        process.kill()
    assert status in (0, -signal.SIGKILL), log.read_text(encoding="utf-8")
    while left := [pid for pid in workers if is_running(pid)]:
        assert time.monotonic() < deadline, f"workers that outlive a killed run: {left}"
        time.sleep(0.05)
    return hit if status else ""


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def is_running(pid: int) -> bool:
    """Not even as what its new parent has not looked at yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_training(
    case: Case, sources: Sources, root: Path, alone: Path, *, kills: int, before: Counter[str], draw: random.Random
) -> Counter[str]:
    """Kill runs of a case so often and compare each, when it is done, with the one that was left alone.

    The next phase is always the one that was hit least, with those of other cases `before`.
    """
    hits: Counter[str] = Counter()
    for number in itertools.count():
        workdir = root / f"{case.corpus}-{case.workers}-{number}"
        args = arguments(case, sources, workdir)
        while hits.total() < kills:
            phase = min(TRAINING, key=lambda name: before[name] + hits[name])
            if hit := kill(args, workdir, phase, draw):
                hits[hit] += 1
            else:
                break
        finish(args)
        assert_equal_runs(workdir, alone)
        if hits.total() == kills:
            return hits
    raise AssertionError("there is always another number")


def kill_preparation(sources: Sources, root: Path, *, kills: int, draw: random.Random) -> int:
    """Kill `seqjax prepare` so often, at random times, and compare the blocks with those of one left alone."""
    begin = time.monotonic()
    finish(prepare_command(sources.stream, root / "whole", "--workers=2"))
    seconds = time.monotonic() - begin
    wanted, hits = contents(root / "whole"), 0
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
        assert contents(root / f"killed-{number}") == wanted
        if hits == kills:
            return hits
    raise AssertionError("there is always another number")


def sweep(root: Path, *, kills: int, seed: int, cases: list[Case] = CASES) -> Counter[str]:
    """Kill `kills` times in all, a sixth of them `seqjax prepare`, and return how often in each phase."""
    draw = random.Random(seed)
    sources = make_sources(root)
    total: Counter[str] = Counter()
    left = kills - max(1, kills // 6)
    for number, case in enumerate(cases):
        share = left // (len(cases) - number)
        left -= share
        alone = root / f"alone-{case.corpus}-{case.workers}"
        finish(arguments(case, sources, alone))
        hits = kill_training(case, sources, root, alone, kills=share, before=total, draw=draw)
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
    given = parser.parse_args()
    # Programs are compiled anew at every start, unless the environment names a directory to keep them.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.stdout.write(f"seed {given.seed}\n")
    with tempfile.TemporaryDirectory(prefix="seqjax-kills-") as root:
        total = sweep(Path(root), kills=given.kills, seed=given.seed)
    sys.stdout.write(f"{total.total()} kills, every run equal: {dict(total)}\n")


if __name__ == "__main__":
    main()
