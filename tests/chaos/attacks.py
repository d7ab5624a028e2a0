"""Attack commands at random and classify how they end.

    python -m tests.chaos.attacks --attacks=400 [--seed=N]
    python -m tests.chaos.attacks --only=NUMBER        # repeat one attack

An attack copies small prepared runs, blocks and results, does one damage drawn from its number, and runs one command:

    files        truncate, change, delete or replace a file (tests/chaos/damage.py)
    settings     invalid values, unknown names, conflicting settings, odd sizes
    signals      a signal, or a closed output pipe, at a random moment; the command then runs again
    environment  full disks, read-only or deleted directories, HOME, TMPDIR, locales, JAX variables

Each result has one class:

    clean        status 0 with the results of an undamaged run; later commands work too. After odd but valid settings,
                 the output is complete.
    one line     another status, and an error line that names the file or the setting
    unclear      another status without such a line
    silent       status 0 with wrong results
    traceback, hang

Commands run in forks of this process, which has imported everything; some run as separate processes. The command
prints the counts, and the number of each attack that is neither clean nor one line. Such attacks give status 1.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tests import support
from tests.chaos import wrong_environment, wrong_settings
from tests.chaos.outcomes import (
    BAD,
    GOOD,
    LIMIT_SECONDS,
    Ended,
    accepted_names,
    call_in_fork,
    classify,
    classify_disturbed,
    difference,
    start,
)
from tests.chaos.scenes import MARKS, Scene, Scenes

PROCESS_SHARE = 0.1  # share of commands on damaged files and settings that run as separate processes
# Phrases in a warning that a command's results are incomplete.
RESULT_WARNINGS = ("is missing", "are lost", "is damaged", "was not written")
NO_BLOCKS = ("The losses of single blocks are not known here", "No block losses")
KINDS = {"files": 0.5, "settings": 0.25, "signals": 0.14, "environment": 0.11}


class Result(NamedTuple):
    """An attack and its result."""

    number: int
    kind: str
    group: str  # the counts are grouped by it
    action: str
    outcome: str
    reason: str = ""


class Attacks:
    """The state that attacks share: the scenes and each scene's undisturbed result."""

    def __init__(self, root: Path):
        """Create all scenes below `root`."""
        self.root, self.scenes = root, Scenes(root / "made")
        self._expected_results: dict[str, Any] = {}
        self.phases: Counter[str] = Counter()

    def attack(self, number: int) -> Result:
        """Run the attack with this number."""
        draw = random.Random(number)
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        folder = self.root / str(number)
        folder.mkdir()
        try:
            return getattr(self, f"_{kind}")(number, draw, folder)
        finally:
            self.scenes.unmount(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def expected(self, scene: Scene) -> Any:
        """Return the result of a scene's command without damage."""
        if scene.name not in self._expected_results:
            folder = self.root / f"undisturbed-{scene.name.replace('/', '-')}"
            scene.copy(folder)
            ended = start(scene.argv(folder), folder / "log").wait()
            assert ended.status == 0, f"{scene.name}: {ended}"
            self._expected_results[scene.name] = self._result(scene, folder, ended)
            assert not isinstance(self._expected_results[scene.name]["files"], str), self._expected_results[scene.name]
            shutil.rmtree(folder)
        return self._expected_results[scene.name]

    def _result(self, scene: Scene, folder: Path, ended: Ended) -> dict[str, Any]:
        files = call_in_fork(lambda: scene.result(folder), folder / "result")
        text = json.dumps({"files": files, "stdout": ended.stdout if scene.has_stdout else ""})
        return json.loads(text.replace(str(folder), "DIR"))

    # ----------------------------------------------------------------------------------------------------------- files
    def _files(self, number: int, draw: random.Random, folder: Path) -> Result:
        scene = self.scenes.draw(draw)
        expected = self.expected(scene)
        scene.copy(folder)
        file, description = scene.damage(folder, draw)
        action = f"{scene.name}: {file} {description}"
        ended = start(scene.argv(folder), folder / "log", as_process=draw.random() < PROCESS_SHARE).wait()
        outcome, reason = classify(ended, accepted_names(file))
        if outcome == "clean" and (result := self._result(scene, folder, ended)) != expected:
            outcome, reason = "silent", difference(result, expected)
            if warning := result_warning(ended, file):
                outcome, reason = "clean", warning
        return Result(number, "files", scene.name, action, outcome, reason)

    # -------------------------------------------------------------------------------------------------------- settings
    def _settings(self, number: int, draw: random.Random, folder: Path) -> Result:
        command, argv, words, must_fail = wrong_settings.draw_command(self.scenes, folder, draw)
        ended = start(argv, folder / "log", as_process=draw.random() < PROCESS_SHARE).wait()
        outcome, reason = classify(ended, words)
        if outcome == "clean" and must_fail:
            outcome, reason = "silent", ended.stdout[-300:]
        elif outcome == "clean" and command == "train" and (folder / "run").exists():
            fault = call_in_fork(lambda: self.scenes.fault_of_run(folder / "run"), folder / "result")
            outcome, reason = ("silent", fault) if fault else (outcome, reason)
        return Result(number, "settings", command, " ".join(argv).replace(str(folder), "DIR"), outcome, reason)

    # --------------------------------------------------------------------------------------------------------- signals
    def _signals(self, number: int, draw: random.Random, folder: Path) -> Result:
        scene = self.scenes.draw_undamaged(draw)
        expected = self.expected(scene)
        scene.copy(folder)
        argv = scene.argv(folder)
        action, phase, ended = self._disturbed(scene, argv, draw, folder)
        self.phases[phase] += 1
        again = start(argv, folder / "again").wait()
        outcome, reason = classify_disturbed(ended)
        if outcome in GOOD:
            outcome, reason = classify(again, ())
            if outcome != "clean":
                outcome, reason = (outcome if outcome in BAD else "unclear"), f"run again: {reason}"
            elif (result := self._result(scene, folder, again)) != expected:
                outcome, reason = "silent", f"run again: {difference(result, expected)}"
            elif ended.status:
                outcome = "one line"
        return Result(number, "signals", action.rpartition(" ")[0], f"{scene.name}: {action}, {phase}", outcome, reason)

    def _disturbed(
        self, scene: Scene, argv: Sequence[str], draw: random.Random, folder: Path
    ) -> tuple[str, str, Ended]:
        """Run a command and disturb it; return the disturbance, the phase that it hit, and the end."""
        disturbance = draw.choice(
            ["SIGINT", "SIGINT", "SIGTERM", "SIGTERM", "SIGKILL", "SIGHUP", "SIGPIPE", "no stdout", "no stderr", "pipe"]
        )
        as_process = draw.random() < 0.5 or not disturbance.startswith("SIG")  # Python opens its streams at startup
        reader = writer = -1
        if disturbance == "pipe":
            reader, writer = os.pipe()

        def streams() -> None:
            if disturbance.startswith("no "):
                os.close({"no stdout": 1, "no stderr": 2}[disturbance])
            if disturbance == "pipe":
                os.close(reader)
                os.dup2(writer, 1)

        begin = time.monotonic()
        process = start(argv, folder / "log", as_process=as_process, setup=streams)
        if writer >= 0:
            os.close(writer)
        # Half of the moments are drawn by time, half by the number of written rows.
        row = draw.randint(1, scene.rows) if scene.rows and draw.random() < 0.5 else 0
        seconds = draw.uniform(0, 0.03) if row else draw.uniform(0, scene.seconds + 3.5 * as_process)
        log = folder / "log.err"
        while process.poll() is None and time.monotonic() < begin + LIMIT_SECONDS:
            if (sum(map(support.n_rows, scene.workdirs(folder))) >= row) if row else time.monotonic() > begin + seconds:
                break
            time.sleep(0.001)
        time.sleep(seconds if row else 0)
        phase = "after the end"
        if process.poll() is None:
            phase = self.scenes.phase(
                scene, folder, log, has_begun=not as_process or any(map(log.read_text().__contains__, MARKS))
            )
            if disturbance == "pipe":
                os.close(reader)
            elif disturbance.startswith("SIG"):
                os.kill(process.pid, getattr(signal, disturbance))
        elif reader >= 0:
            os.close(reader)
        return f"{disturbance} {'process' if as_process else 'fork'}", phase, process.wait()

    # ----------------------------------------------------------------------------------------------------- environment
    def _environment(self, number: int, draw: random.Random, folder: Path) -> Result:
        return Result(number, "environment", *wrong_environment.attack(self, draw, folder))


def result_warning(ended: Ended, file: str) -> str:
    """Return the line that warns of results without `file`, or ""."""
    lines = [*ended.stdout.splitlines(), *ended.stderr.splitlines()]
    known = [line for line in lines if Path(file).name in line and any(word in line for word in RESULT_WARNINGS)]
    return known[0] if known else next((line for line in lines if line.startswith(NO_BLOCKS) and "blocks" in file), "")


def print_now(text: str) -> None:
    """Print a line and flush."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def sweep(root: Path, numbers: Sequence[int]) -> tuple[list[Result], Counter[str]]:
    """Run attacks; return the results and the phases that signals hit. Ctrl-C returns the results so far."""
    attacks = Attacks(root)
    results: list[Result] = []
    for i, number in enumerate(numbers, start=1):
        try:
            results.append(result := attacks.attack(number))
        except KeyboardInterrupt:
            break
        if result.outcome not in GOOD or len(numbers) == 1:
            print_now(f"{result.outcome}, {result.kind}, --only={number}: {result.action}\n    {result.reason}")
        if i % 50 == 0:
            print_now(f"{i} of {len(numbers)}")
    return results, attacks.phases


def table(results: Sequence[Result], phases: Counter[str]) -> str:
    """Return the table of counts."""
    classes = [*GOOD, *BAD]
    groups = {kind: sorted({r.group for r in results if r.kind == kind}) for kind in KINDS}
    rows = [("", *classes)]
    for kind, kind_results in groups.items():
        for name, chosen in [(kind, [r for r in results if r.kind == kind])] + [
            (f"  {group}", [r for r in results if (r.kind, r.group) == (kind, group)]) for group in kind_results
        ]:
            counts = Counter(result.outcome for result in chosen)
            rows.append((name, *(str(counts[c]) for c in classes)))
    total = Counter(result.outcome for result in results)
    rows.append(("all", *(str(total[c]) for c in classes)))
    width = max(len(row[0]) for row in rows)
    lines = [f"{row[0]:{width}}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows]
    inside = sum(phases.values()) - phases["after the end"]
    if phases:
        counts = ", ".join(f"{phase} {count}" for phase, count in phases.most_common())
        lines.append(f"signals that hit before the end: {inside} of {phases.total()} ({counts})")
    return "\n".join(lines)


def use_environment(root: Path) -> None:
    """Keep compiled programs and caches below `root`, for this process and its children."""
    jax_options = {
        "jax_platforms": "cpu",
        "jax_compilation_cache_dir": f"{root}/compiled",
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in jax_options.items():  # JAX has already read its environment
        jax.config.update(name, value)
    os.environ |= support.environment() | {"PYTHONPATH": str(support.ROOT), "XDG_CACHE_HOME": f"{root}/cache"}
    os.environ |= {name.upper(): str(value) for name, value in jax_options.items()}


def main() -> None:
    """Print the counts; exit with status 1 if any attack has a bad class."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", default=400, type=int)
    parser.add_argument("--seed", default=random.SystemRandom().randrange(1000), type=int)
    parser.add_argument("--only", type=int, action="append", help="the number of an attack, to repeat it")
    args = parser.parse_args()
    sys.stdout.write(f"seed {args.seed}\n")
    numbers = args.only or [args.seed * 10_000 + i for i in range(args.attacks)]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seqjax-attacks-") as root:
        Path(root).chmod(0o755)
        use_environment(Path(root))
        results, phases = sweep(Path(root), numbers)
    sys.stdout.write(f"{table(results, phases)}\n")
    sys.stdout.write(f"{len(results)} attacks in {time.monotonic() - begin:.0f} s\n")
    sys.exit(any(result.outcome not in GOOD for result in results))


if __name__ == "__main__":
    main()
