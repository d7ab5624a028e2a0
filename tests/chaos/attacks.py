"""Attacks commands at random and sorts what they do: is it right, one sentence, a traceback, silence, or endless?

    python -m tests.chaos.attacks --attacks=400 [--seed=N]
    python -m tests.chaos.attacks --only=NUMBER        # one of them again

Every attack copies what it needs of small runs, blocks and results that are made once, does one damage, drawn from its
number, and runs one command:

    files        one file of them is cut, changed, lost or replaced (tests/chaos/damage.py)
    settings     a value that must be refused, an unknown name, settings that conflict, odd sizes
    signals      a signal, or a reader of the output that leaves, at a random moment; the command is then run again
    environment  full disks, directories that are read-only or lost, HOME, TMPDIR, locales, variables of JAX

What the command does is of one class:

    clean        it ends with status 0, with the same results as without the damage, and nothing is left that a later
                 command stumbles over; or, of odd settings that are no damage, what it makes is whole
    one line     it ends with another status; the last message is one sentence that names the file or the setting
    unclear      it ends with another status and a message that does not
    traceback, silent (status 0, and what was damaged mattered), hang

Commands run in forks of this process, in which everything is imported, and a part of them as processes of their own.
The counts are printed, with the number of each attack that is neither clean nor one line; any of these is status 1.
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
from tests.chaos.outcomes import BAD, GOOD, LIMIT_SECONDS, Ended, ask, difference, disturbed, judged, names, start
from tests.chaos.scenes import MARKS, Scene, Scenes

REAL = 0.1  # of the commands on damaged files and settings are processes of their own
TELLING = ("is missing", "are lost", "is damaged", "was not written")  # in what a command says that it cannot show
NO_BLOCKS = ("The losses of single blocks are not known here", "No block losses")
KINDS = {"files": 0.5, "settings": 0.25, "signals": 0.14, "environment": 0.11}


class Result(NamedTuple):
    """An attack, what was done and what came of it."""

    number: int
    kind: str
    group: str  # the counts are by it
    done: str
    found: str
    why: str = ""


class Attacks:
    """All that attacks share: the scenes, and what an undisturbed command makes of each."""

    def __init__(self, root: Path):
        """Make everything below `root`."""
        self.root, self.scenes = root, Scenes(root / "made")
        self._known: dict[str, Any] = {}
        self.moments: Counter[str] = Counter()

    def attack(self, number: int) -> Result:
        """Run the attack of a number."""
        draw = random.Random(number)
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        place = self.root / str(number)
        place.mkdir()
        try:
            return getattr(self, f"_{kind}")(number, draw, place)
        finally:
            self.scenes.unmount(place)
            shutil.rmtree(place, ignore_errors=True)

    def wanted(self, scene: Scene) -> Any:
        """What the command of a scene makes where nothing is damaged."""
        if scene.name not in self._known:
            place = self.root / f"undisturbed-{scene.name.replace('/', '-')}"
            scene.copy(place)
            ended = start(scene.argv(place), place / "log").wait()
            assert ended.status == 0, f"{scene.name}: {ended}"
            self._known[scene.name] = self._made(scene, place, ended)
            assert not isinstance(self._known[scene.name]["files"], str), self._known[scene.name]
            shutil.rmtree(place)
        return self._known[scene.name]

    def _made(self, scene: Scene, place: Path, ended: Ended) -> dict[str, Any]:
        files = ask(lambda: scene.result(place), place / "result")
        text = json.dumps({"files": files, "stdout": ended.stdout if scene.says else ""})
        return json.loads(text.replace(str(place), "DIR"))

    # ----------------------------------------------------------------------------------------------------------- files
    def _files(self, number: int, draw: random.Random, place: Path) -> Result:
        scene = self.scenes.draw(draw)
        wanted = self.wanted(scene)
        scene.copy(place)
        file, how = scene.damage(place, draw)
        done = f"{scene.name}: {file} {how}"
        ended = start(scene.argv(place), place / "log", real=draw.random() < REAL).wait()
        found, why = judged(ended, names(file))
        if found == "clean" and (made := self._made(scene, place, ended)) != wanted:
            found, why = "silent", difference(made, wanted)
            if said := told(ended, file):
                found, why = "clean", said
        return Result(number, "files", scene.name, done, found, why)

    # -------------------------------------------------------------------------------------------------------- settings
    def _settings(self, number: int, draw: random.Random, place: Path) -> Result:
        command, argv, words, must_fail = wrong_settings.drawn(self.scenes, place, draw)
        ended = start(argv, place / "log", real=draw.random() < REAL).wait()
        found, why = judged(ended, words)
        if found == "clean" and must_fail:
            found, why = "silent", ended.stdout[-300:]
        elif found == "clean" and command == "train" and (place / "run").exists():
            fault = ask(lambda: self.scenes.fault_of_run(place / "run"), place / "result")
            found, why = ("silent", fault) if fault else (found, why)
        return Result(number, "settings", command, " ".join(argv).replace(str(place), "DIR"), found, why)

    # --------------------------------------------------------------------------------------------------------- signals
    def _signals(self, number: int, draw: random.Random, place: Path) -> Result:
        scene = self.scenes.draw_whole(draw)
        wanted = self.wanted(scene)
        scene.copy(place)
        argv = scene.argv(place)
        done, hit, ended = self._disturbed(scene, argv, draw, place)
        self.moments[hit] += 1
        again = start(argv, place / "again").wait()
        found, why = disturbed(ended)
        if found in GOOD:
            found, why = judged(again, ())
            if found != "clean":
                found, why = (found if found in BAD else "unclear"), f"run again: {why}"
            elif (made := self._made(scene, place, again)) != wanted:
                found, why = "silent", f"run again: {difference(made, wanted)}"
            elif ended.status:
                found = "one line"
        return Result(number, "signals", done.rpartition(" ")[0], f"{scene.name}: {done}, {hit}", found, why)

    def _disturbed(self, scene: Scene, argv: Sequence[str], draw: random.Random, place: Path) -> tuple[str, str, Ended]:
        """Run a command and disturb it; what was done, in which phase it was, and how it ended."""
        how = draw.choice(
            ["SIGINT", "SIGINT", "SIGTERM", "SIGTERM", "SIGKILL", "SIGHUP", "SIGPIPE", "no stdout", "no stderr", "pipe"]
        )
        real = draw.random() < 0.5 or not how.startswith("SIG")  # Python looks at its streams when it starts
        reader = writer = -1
        if how == "pipe":
            reader, writer = os.pipe()

        def streams() -> None:
            if how.startswith("no "):
                os.close({"no stdout": 1, "no stderr": 2}[how])
            if how == "pipe":
                os.close(reader)
                os.dup2(writer, 1)

        begin = time.monotonic()
        process = start(argv, place / "log", real=real, before=streams)
        if writer >= 0:
            os.close(writer)
        # Half of the moments are drawn by the clock, half by the rows that a run has written.
        row = draw.randint(1, scene.rows) if scene.rows and draw.random() < 0.5 else 0
        seconds = draw.uniform(0, 0.03) if row else draw.uniform(0, scene.seconds + 3.5 * real)
        log = place / "log.err"
        while process.poll() is None and time.monotonic() < begin + LIMIT_SECONDS:
            if (sum(map(support.n_rows, scene.workdirs(place))) >= row) if row else time.monotonic() > begin + seconds:
                break
            time.sleep(0.001)
        time.sleep(seconds if row else 0)
        hit = "after the end"
        if process.poll() is None:
            hit = self.scenes.phase(scene, place, log, begun=not real or any(map(log.read_text().__contains__, MARKS)))
            if how == "pipe":
                os.close(reader)
            elif how.startswith("SIG"):
                os.kill(process.pid, getattr(signal, how))
        elif reader >= 0:
            os.close(reader)
        return f"{how} {'process' if real else 'fork'}", hit, process.wait()

    # ----------------------------------------------------------------------------------------------------- environment
    def _environment(self, number: int, draw: random.Random, place: Path) -> Result:
        return Result(number, "environment", *wrong_environment.attack(self, draw, place))


def told(ended: Ended, file: str) -> str:
    """The line in which a command says that its results are others because of a file; "" if there is none."""
    lines = [*ended.stdout.splitlines(), *ended.stderr.splitlines()]
    known = [line for line in lines if Path(file).name in line and any(word in line for word in TELLING)]
    return known[0] if known else next((line for line in lines if line.startswith(NO_BLOCKS) and "blocks" in file), "")


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def sweep(root: Path, numbers: Sequence[int]) -> tuple[list[Result], Counter[str]]:
    """Run attacks; the results, and in which phases signals hit. Ctrl-C ends it with the results so far."""
    attacks = Attacks(root)
    results: list[Result] = []
    for i, number in enumerate(numbers, start=1):
        try:
            results.append(result := attacks.attack(number))
        except KeyboardInterrupt:
            break
        if result.found not in GOOD or len(numbers) == 1:
            say(f"{result.found}, {result.kind}, --only={number}: {result.done}\n    {result.why}")
        if i % 50 == 0:
            say(f"{i} of {len(numbers)}")
    return results, attacks.moments


def table(results: Sequence[Result], moments: Counter[str]) -> str:
    """The counts."""
    classes = [*GOOD, *BAD]
    groups = {kind: sorted({r.group for r in results if r.kind == kind}) for kind in KINDS}
    rows = [("", *classes)]
    for kind, of_kind in groups.items():
        for name, chosen in [(kind, [r for r in results if r.kind == kind])] + [
            (f"  {group}", [r for r in results if (r.kind, r.group) == (kind, group)]) for group in of_kind
        ]:
            counts = Counter(result.found for result in chosen)
            rows.append((name, *(str(counts[c]) for c in classes)))
    total = Counter(result.found for result in results)
    rows.append(("all", *(str(total[c]) for c in classes)))
    width = max(len(row[0]) for row in rows)
    lines = [f"{row[0]:{width}}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows]
    inside = sum(moments.values()) - moments["after the end"]
    if moments:
        phases = ", ".join(f"{phase} {count}" for phase, count in moments.most_common())
        lines.append(f"signals that hit before the end: {inside} of {moments.total()} ({phases})")
    return "\n".join(lines)


def use_environment(root: Path) -> None:
    """Keep compiled programs and what commands cache below a directory, for this process, its forks and others."""
    of_jax = {
        "jax_platforms": "cpu",
        "jax_compilation_cache_dir": f"{root}/compiled",
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in of_jax.items():  # JAX has been imported, and has read its environment
        jax.config.update(name, value)
    os.environ |= support.environment() | {"PYTHONPATH": str(support.ROOT), "XDG_CACHE_HOME": f"{root}/cache"}
    os.environ |= {name.upper(): str(value) for name, value in of_jax.items()}


def main() -> None:
    """Print the counts; status 1 if an attack is of a bad class."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", default=400, type=int)
    parser.add_argument("--seed", default=random.SystemRandom().randrange(1000), type=int)
    parser.add_argument("--only", type=int, action="append", help="the number of an attack, to repeat it")
    given = parser.parse_args()
    sys.stdout.write(f"seed {given.seed}\n")
    numbers = given.only or [given.seed * 10_000 + i for i in range(given.attacks)]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seqjax-attacks-") as root:
        Path(root).chmod(0o755)
        use_environment(Path(root))
        results, moments = sweep(Path(root), numbers)
    sys.stdout.write(f"{table(results, moments)}\n")
    sys.stdout.write(f"{len(results)} attacks in {time.monotonic() - begin:.0f} s\n")
    sys.exit(any(result.found not in GOOD for result in results))


if __name__ == "__main__":
    main()
