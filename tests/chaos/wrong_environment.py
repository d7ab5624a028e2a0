"""Attacks on the environment for `tests.chaos.attacks`: disks, directories and variables."""

import json
import random
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any

from tests import support
from tests.chaos.outcomes import LIMIT_SECONDS, classify, difference, start
from tests.chaos.scenes import Scene

LOCALES = ["C", "POSIX", "tr_TR.UTF-8", "xx_YY", "en_US.ISO-8859-1", ""]
# Variables that must not change a result; None unsets a variable.
HARMLESS: list[dict[str, str | None]] = [
    {"HOME": None}, {"HOME": "/nowhere"}, {"HOME": "/dev/null"}, {"HOME": ""}, {"TMPDIR": "/nowhere"}, {"TMPDIR": ""},
    {"XDG_CACHE_HOME": "/dev/null"}, {"XDG_CACHE_HOME": "/dev/null", "HOME": None}, {"PATH": ""}, {"COLUMNS": "0"},
    {"COLUMNS": "zzz"}, {"TERM": "dumb"}, {"TERM": None, "USER": None, "LOGNAME": None}, {"TZ": "Nowhere/Else"},
    {"PYTHONIOENCODING": "ascii"}, {"PYTHONUNBUFFERED": "1"}, {"PYTHONOPTIMIZE": "2"}, {"MPLBACKEND": "zzz"},
    {"MPLCONFIGDIR": "/dev/null"}, {"SOURCE_DATE_EPOCH": "0"}, {"CUDA_VISIBLE_DEVICES": "7"}, {"NO_COLOR": "1"},
    *({"LC_ALL": name, "LANG": None} for name in LOCALES),
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "tr_TR.UTF-8", "PYTHONUTF8": "0"},
]  # fmt: skip
# Variables that a command must reject, and the name that its error must contain.
HARMFUL: list[tuple[dict[str, str | None], str]] = [
    ({"JAX_PLATFORMS": "cuda"}, "JAX_PLATFORMS"),
    ({"JAX_PLATFORMS": "zzz"}, "JAX_PLATFORMS"),
    ({"JAX_PLATFORMS": "tpu"}, "JAX_PLATFORMS"),
    ({"JAX_DISABLE_JIT": "1"}, "JAX_DISABLE_JIT"),
]
KINDS = {"full disk": 3, "file limit": 3, "read-only": 3, "variables": 5, "moved": 2, "removed": 2, "no directory": 1}


def attack(attacks: Any, draw: random.Random, folder: Path) -> tuple[str, str, str, str]:
    """Run a command in a damaged environment; return kind, action, class and reason."""
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    action, outcome, reason = globals()[f"_{kind.replace(' ', '_').replace('-', '_')}"](attacks, draw, folder)
    return kind, action, outcome, reason


def _classify_and_rerun(
    attacks: Any, scene: Scene, folder: Path, ended: Any, words: tuple[str, ...]
) -> tuple[str, str]:
    """Classify an end, then run the command again without damage and check its result."""
    outcome, reason = classify(ended, words)
    if outcome not in ("clean", "one line"):
        return outcome, reason
    again = start(scene.argv(folder), folder / "again").wait() if outcome == "one line" else ended
    retry_outcome, retry_reason = classify(again, ())
    if retry_outcome != "clean":
        return ("unclear" if retry_outcome == "one line" else retry_outcome), f"run again: {retry_reason}"
    if (result := attacks._result(scene, folder, again)) != attacks.expected(scene):
        return "silent", difference(result, attacks.expected(scene))
    return outcome, reason


def _full_disk(attacks: Any, draw: random.Random, folder: Path) -> tuple[str, str, str]:
    scene = attacks.scenes.draw_undamaged(draw)
    attacks.expected(scene)
    kib = round(2 ** draw.uniform(4, 11))
    disk = folder / "disk"
    attacks.scenes.mount(disk, "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs")
    try:
        scene.copy(disk)
    except OSError:
        attacks.scenes.mount(disk, "-o", "remount,size=64m")
        shutil.rmtree(disk, ignore_errors=True)
        scene.copy(disk)
        used = shutil.disk_usage(disk).used // 1024  # a tmpfs cannot shrink below its used pages
        attacks.scenes.mount(disk, "-o", f"remount,size={used + kib}k")
    ended = start(scene.argv(disk), folder / "log", cwd=disk).wait()
    attacks.scenes.mount(disk, "-o", "remount,size=64m")
    outcome, reason = _classify_and_rerun(attacks, scene, disk, ended, ("space", "disk", "No space"))
    return f"{scene.name} on {kib} KiB", outcome, reason


def _file_limit(attacks: Any, draw: random.Random, folder: Path) -> tuple[str, str, str]:
    scene = attacks.scenes.draw_undamaged(draw)
    attacks.expected(scene)
    scene.copy(folder)
    most = round(2 ** draw.uniform(11, 16))  # also limits the log, which needs room for the error line
    (folder / "logs").mkdir()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # noqa: E731
    ended = start(scene.argv(folder), folder / "log", setup=limit, env={"JAX_ENABLE_COMPILATION_CACHE": "0"}).wait()
    outcome, reason = _classify_and_rerun(attacks, scene, folder, ended, ("space", "disk", "File too large"))
    return f"{scene.name}, files of {most} bytes", outcome, reason


def _read_only(attacks: Any, draw: random.Random, folder: Path) -> tuple[str, str, str]:
    scene = attacks.scenes.draw(draw) if draw.random() < 0.5 else attacks.scenes.draw_undamaged(draw)
    attacks.expected(scene)
    mounted = folder / "here"
    scene.copy(mounted)
    argv = scene.argv(mounted)  # may write a study file
    attacks.scenes.mount(mounted, "--bind", str(mounted))
    attacks.scenes.mount(mounted, "-o", "remount,ro,bind")
    ended = start(argv, folder / "log", cwd=mounted).wait()
    attacks.scenes.unmount(folder)
    attacks.scenes.unmount(folder)
    outcome, reason = classify(ended, ("Read-only", "read-only", "Cannot write", "cannot be written"))
    # Correct printed results are clean if the command reports that it could not write them.
    if outcome == "clean" and "was not written" in ended.stderr:
        return f"{scene.name}, read-only", outcome, ended.stderr[-200:]
    if outcome in ("clean", "one line"):
        outcome, reason = _classify_and_rerun(attacks, scene, mounted, ended, ())
    return f"{scene.name}, read-only", outcome, reason


def _variables(attacks: Any, draw: random.Random, folder: Path) -> tuple[str, str, str]:
    scene = attacks.scenes.draw(draw) if draw.random() < 0.3 else attacks.scenes.draw_undamaged(draw)
    if draw.random() < 0.25:
        variables, word = draw.choice(HARMFUL)
        scene = attacks.scenes.all[draw.choice(["fresh", "train/half", "evaluate", "generate"])]
    else:
        variables, word = draw.choice(HARMLESS), ""
    attacks.expected(scene)
    scene.copy(folder)
    ended = start(scene.argv(folder), folder / "log", as_process=True, env=variables).wait()
    action = f"{scene.name}, {variables}"
    if not word:
        return action, *_classify_and_rerun(attacks, scene, folder, ended, tuple(variables))
    outcome, reason = classify(ended, (word,))
    if outcome == "clean" and scene.name not in ("evaluate", "generate"):
        return action, "silent", "it must be refused"
    if outcome == "clean" and "JAX_DISABLE_JIT" in variables:  # without jit, sums have another order
        result, expected = (_rounded(x) for x in (attacks._result(scene, folder, ended), attacks.expected(scene)))
        return action, *((outcome, reason) if result == expected else ("silent", difference(result, expected)))
    return (
        (action, *_classify_and_rerun(attacks, scene, folder, ended, (word,)))
        if outcome in ("clean", "one line")
        else (action, outcome, reason)
    )


def _rounded(value: Any) -> Any:
    """Return a JSON value with floats rounded to three decimals."""
    return json.loads(re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.3f}", json.dumps(value)))


def _no_directory(attacks: Any, draw: random.Random, folder: Path) -> tuple[str, str, str]:
    """Delete the current directory before the command starts."""
    scene = attacks.scenes.draw_undamaged(draw)
    attacks.expected(scene)
    scene.copy(folder)
    gone = folder / "gone"
    gone.mkdir()
    ended = start(scene.argv(folder), folder / "log", as_process=True, cwd=gone, setup=gone.rmdir).wait()
    return f"{scene.name}, no current directory", *_classify_and_rerun(attacks, scene, folder, ended, ("directory",))


def _moved(attacks: Any, draw: random.Random, folder: Path, *, removed: bool = False) -> tuple[str, str, str]:
    """Move or remove a run's workdir while it trains."""
    scene = attacks.scenes.all[draw.choice(["fresh", "fresh trunk", "train/half"])]
    attacks.expected(scene)
    scene.copy(folder)
    workdir, new_path = folder / "run", folder / "elsewhere"
    row, delay = draw.randint(1, scene.rows), draw.uniform(0, 0.02)
    row += sum(map(support.n_rows, scene.workdirs(folder)))
    process, begin = start(scene.argv(folder), folder / "log"), time.monotonic()
    while process.poll() is None and time.monotonic() < begin + LIMIT_SECONDS:
        if sum(map(support.n_rows, scene.workdirs(folder))) >= row:
            break
        time.sleep(0.001)
    time.sleep(delay)
    action = f"{scene.name}, {'removed' if removed else 'moved'} at row {row}"
    if removed:
        shutil.rmtree(workdir, ignore_errors=True)
    else:
        workdir.rename(new_path)
    ended = process.wait()
    outcome, reason = classify(ended, ("moved or deleted", str(workdir)))
    if removed or outcome not in ("clean", "one line"):
        is_consistent = outcome != "clean" or not workdir.exists() or "after the end"
        return action, (outcome if is_consistent else "silent"), reason
    shutil.rmtree(workdir, ignore_errors=True)
    new_path.rename(workdir)
    return action, *_classify_and_rerun(attacks, scene, folder, ended, ())


def _removed(attacks: Any, draw: random.Random, folder: Path) -> tuple[str, str, str]:
    return _moved(attacks, draw, folder, removed=True)
