"""Disks, directories and variables that are not as a command expects, for `tests.chaos.attacks`."""

import json
import random
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any

from tests import support
from tests.chaos.outcomes import LIMIT_SECONDS, difference, judged, start
from tests.chaos.scenes import Scene

LOCALES = ["C", "POSIX", "tr_TR.UTF-8", "xx_YY", "en_US.ISO-8859-1", ""]
# Variables that must not change a result; None is unset.
HARMLESS: list[dict[str, str | None]] = [
    {"HOME": None}, {"HOME": "/nowhere"}, {"HOME": "/dev/null"}, {"HOME": ""}, {"TMPDIR": "/nowhere"}, {"TMPDIR": ""},
    {"XDG_CACHE_HOME": "/dev/null"}, {"XDG_CACHE_HOME": "/dev/null", "HOME": None}, {"PATH": ""}, {"COLUMNS": "0"},
    {"COLUMNS": "zzz"}, {"TERM": "dumb"}, {"TERM": None, "USER": None, "LOGNAME": None}, {"TZ": "Nowhere/Else"},
    {"PYTHONIOENCODING": "ascii"}, {"PYTHONUNBUFFERED": "1"}, {"PYTHONOPTIMIZE": "2"}, {"MPLBACKEND": "zzz"},
    {"MPLCONFIGDIR": "/dev/null"}, {"SOURCE_DATE_EPOCH": "0"}, {"CUDA_VISIBLE_DEVICES": "7"}, {"NO_COLOR": "1"},
    *({"LC_ALL": name, "LANG": None} for name in LOCALES),
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "tr_TR.UTF-8", "PYTHONUTF8": "0"},
]  # fmt: skip
# Variables that a command cannot work with, and what its message must name.
HARMFUL: list[tuple[dict[str, str | None], str]] = [
    ({"JAX_PLATFORMS": "cuda"}, "JAX_PLATFORMS"),
    ({"JAX_PLATFORMS": "zzz"}, "JAX_PLATFORMS"),
    ({"JAX_PLATFORMS": "tpu"}, "JAX_PLATFORMS"),
    ({"JAX_DISABLE_JIT": "1"}, "JAX_DISABLE_JIT"),
]
KINDS = {"full disk": 3, "file limit": 3, "read-only": 3, "variables": 5, "moved": 2, "removed": 2, "no directory": 1}


def attack(attacks: Any, draw: random.Random, place: Path) -> tuple[str, str, str, str]:
    """Run a command in such an environment: kind, what was done, class, why."""
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    done, found, why = globals()[f"_{kind.replace(' ', '_').replace('-', '_')}"](attacks, draw, place)
    return kind, done, found, why


def _then(attacks: Any, scene: Scene, place: Path, ended: Any, words: tuple[str, ...]) -> tuple[str, str]:
    """The class of an end; the command is then run again, where nothing is amiss, and must be right."""
    found, why = judged(ended, words)
    if found not in ("clean", "one line"):
        return found, why
    again = start(scene.argv(place), place / "again").wait() if found == "one line" else ended
    late, said = judged(again, ())
    if late != "clean":
        return ("unclear" if late == "one line" else late), f"run again: {said}"
    if (made := attacks._made(scene, place, again)) != attacks.wanted(scene):
        return "silent", difference(made, attacks.wanted(scene))
    return found, why


def _full_disk(attacks: Any, draw: random.Random, place: Path) -> tuple[str, str, str]:
    scene = attacks.scenes.draw_whole(draw)
    attacks.wanted(scene)
    kib = round(2 ** draw.uniform(4, 11))
    disk = place / "disk"
    attacks.scenes.mount(disk, "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs")
    try:
        scene.copy(disk)
    except OSError:
        attacks.scenes.mount(disk, "-o", "remount,size=64m")
        shutil.rmtree(disk, ignore_errors=True)
        scene.copy(disk)
        used = shutil.disk_usage(disk).used // 1024  # in whole pages: a disk cannot be made smaller than that
        attacks.scenes.mount(disk, "-o", f"remount,size={used + kib}k")
    ended = start(scene.argv(disk), place / "log", cwd=disk).wait()
    attacks.scenes.mount(disk, "-o", "remount,size=64m")
    found, why = _then(attacks, scene, disk, ended, ("space", "disk", "No space"))
    return f"{scene.name} on {kib} KiB", found, why


def _file_limit(attacks: Any, draw: random.Random, place: Path) -> tuple[str, str, str]:
    scene = attacks.scenes.draw_whole(draw)
    attacks.wanted(scene)
    scene.copy(place)
    most = round(2 ** draw.uniform(11, 16))  # of the log too, which must have room for the line
    (place / "logs").mkdir()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # noqa: E731
    ended = start(scene.argv(place), place / "log", before=limit, env={"JAX_ENABLE_COMPILATION_CACHE": "0"}).wait()
    found, why = _then(attacks, scene, place, ended, ("space", "disk", "File too large"))
    return f"{scene.name}, files of {most} bytes", found, why


def _read_only(attacks: Any, draw: random.Random, place: Path) -> tuple[str, str, str]:
    scene = attacks.scenes.draw(draw) if draw.random() < 0.5 else attacks.scenes.draw_whole(draw)
    attacks.wanted(scene)
    here = place / "here"
    scene.copy(here)
    argv = scene.argv(here)  # which may write a study file
    attacks.scenes.mount(here, "--bind", str(here))
    attacks.scenes.mount(here, "-o", "remount,ro,bind")
    ended = start(argv, place / "log", cwd=here).wait()
    attacks.scenes.unmount(place)
    attacks.scenes.unmount(place)
    found, why = judged(ended, ("Read-only", "read-only", "Cannot write", "cannot be written"))
    if (
        found == "clean" and "was not written" in ended.stderr
    ):  # what is read is right; its file is missing, and said so
        return f"{scene.name}, read-only", found, ended.stderr[-200:]
    if found in ("clean", "one line"):
        found, why = _then(attacks, scene, here, ended, ())
    return f"{scene.name}, read-only", found, why


def _variables(attacks: Any, draw: random.Random, place: Path) -> tuple[str, str, str]:
    scene = attacks.scenes.draw(draw) if draw.random() < 0.3 else attacks.scenes.draw_whole(draw)
    if draw.random() < 0.25:
        variables, word = draw.choice(HARMFUL)
        scene = attacks.scenes.all[draw.choice(["fresh", "train/half", "evaluate", "generate"])]
    else:
        variables, word = draw.choice(HARMLESS), ""
    attacks.wanted(scene)
    scene.copy(place)
    ended = start(scene.argv(place), place / "log", real=True, env=variables).wait()
    done = f"{scene.name}, {variables}"
    if not word:
        return done, *_then(attacks, scene, place, ended, tuple(variables))
    found, why = judged(ended, (word,))
    if found == "clean" and scene.name not in ("evaluate", "generate"):
        return done, "silent", "it must be refused"
    if found == "clean" and "JAX_DISABLE_JIT" in variables:  # then sums are taken in another order
        made, wanted = (_rounded(x) for x in (attacks._made(scene, place, ended), attacks.wanted(scene)))
        return done, *((found, why) if made == wanted else ("silent", difference(made, wanted)))
    return (
        (done, *_then(attacks, scene, place, ended, (word,))) if found in ("clean", "one line") else (done, found, why)
    )


def _rounded(value: Any) -> Any:
    """A JSON value with three digits after the point."""
    return json.loads(re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.3f}", json.dumps(value)))


def _no_directory(attacks: Any, draw: random.Random, place: Path) -> tuple[str, str, str]:
    """The current directory is deleted before the command begins."""
    scene = attacks.scenes.draw_whole(draw)
    attacks.wanted(scene)
    scene.copy(place)
    gone = place / "gone"
    gone.mkdir()
    ended = start(scene.argv(place), place / "log", real=True, cwd=gone, before=gone.rmdir).wait()
    return f"{scene.name}, no current directory", *_then(attacks, scene, place, ended, ("directory",))


def _moved(attacks: Any, draw: random.Random, place: Path, *, removed: bool = False) -> tuple[str, str, str]:
    """The workdir of a run is moved away, or removed, while it trains."""
    scene = attacks.scenes.all[draw.choice(["fresh", "fresh trunk", "train/half"])]
    attacks.wanted(scene)
    scene.copy(place)
    workdir, elsewhere = place / "run", place / "elsewhere"
    row, delay = draw.randint(1, scene.rows), draw.uniform(0, 0.02)
    row += sum(map(support.n_rows, scene.workdirs(place)))
    process, begin = start(scene.argv(place), place / "log"), time.monotonic()
    while process.poll() is None and time.monotonic() < begin + LIMIT_SECONDS:
        if sum(map(support.n_rows, scene.workdirs(place))) >= row:
            break
        time.sleep(0.001)
    time.sleep(delay)
    done = f"{scene.name}, {'removed' if removed else 'moved'} at row {row}"
    if removed:
        shutil.rmtree(workdir, ignore_errors=True)
    else:
        workdir.rename(elsewhere)
    ended = process.wait()
    found, why = judged(ended, ("moved or deleted", str(workdir)))
    if removed or found not in ("clean", "one line"):
        whole = found != "clean" or not workdir.exists() or "after the end"
        return done, (found if whole else "silent"), why
    shutil.rmtree(workdir, ignore_errors=True)
    elsewhere.rename(workdir)
    return done, *_then(attacks, scene, place, ended, ())


def _removed(attacks: Any, draw: random.Random, place: Path) -> tuple[str, str, str]:
    return _moved(attacks, draw, place, removed=True)
