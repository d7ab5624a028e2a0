"""Scenes for `tests.chaos.attacks`: a command and copies of small runs, blocks and results."""

import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from seqjax.data.manifests import read_manifest
from seqjax.evals.recall import report as recall_report
from seqjax.evals.recall.setups import SETUPS
from seqjax.reading import read_json
from seqjax.study.runs import collect
from seqjax.training import eval_losses, metrics, token_classes
from seqjax.training import loop as train_module
from seqjax.training.evaluate import restore
from tests import support
from tests.chaos import damage, kills
from tests.chaos.outcomes import start
from tests.data.conftest import write_corpus

MARKS = ("Training ", "Resuming ")  # a run prints one of these before it compiles
STEPS, STOP, EVERY = 24, 15, 6
ENDS = ("12", "24")
SETTINGS: dict[str, Any] = {
    "train__steps": STEPS, "checkpoint__every": 4, "eval__every": EVERY * 8 * support.SEQ_LEN, "eval__classes": True,
    "eval__tokens": 4 * support.SEQ_LEN, "log__sample_tokens": 4, "model__n_layers": 1,
}  # fmt: skip
TRUNK: dict[str, Any] = SETTINGS | {
    "train__ends": (0.5, 1.0), "optim__cooldown": 0.5, "checkpoint__ends": "all", "eval__every": 0,
    "log__sample_tokens": 0,
}  # fmt: skip


class Scene(NamedTuple):
    """A command on copies of prepared files, some of which may be damaged.

    `result` returns the command's result as JSON, to compare with the undamaged result. `has_stdout` means that the
    printed text is part of the result. `rows` and `seconds` are approximate sizes of the whole command. `weight` is the
    relative frequency.
    """

    name: str
    sources: dict[str, Path]  # name of the copy -> source
    argv: Callable[[Path], list[str]]
    damaged: tuple[str, ...]  # names of the copies that may be damaged
    result: Callable[[Path], Any]
    has_stdout: bool = False
    weight: float = 1.0
    rows: int = 0
    seconds: float = 3.0
    runs: tuple[str, ...] = ()  # workdirs that the command writes

    def copy(self, folder: Path) -> None:
        """Copy the sources."""
        folder.mkdir(exist_ok=True)
        for name, source in self.sources.items():
            damage.copy(source, folder / name)

    def workdirs(self, folder: Path) -> list[Path]:
        """Return the directories whose rows show the command's progress."""
        return [d for name in self.runs for d in (folder / name, *(folder / name / "ends" / end for end in ENDS))]

    def damage(self, folder: Path, draw: random.Random) -> tuple[str, str]:
        """Damage one file and return its path and the description.

        The kind of file is drawn first, because most files belong to checkpoints.
        """
        name = draw.choice(self.damaged)
        root = folder / name
        files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
        kinds: dict[str, list[Path]] = {}
        for file in files:
            kinds.setdefault(_kind(file.relative_to(folder).as_posix()), []).append(file)
        file = draw.choice(kinds[draw.choice(sorted(kinds))])
        return file.relative_to(folder).as_posix(), damage.damage(file, draw, spared=self.spared(file.name))

    def spared(self, name: str) -> tuple[Callable[..., str], ...]:
        """Return the kinds of damage that leave a valid file, which no command can detect.

        A missing setting has its default, as in a workdir of an earlier version. A missing text is not prepared. The
        weights in a public model's file have no checksum.
        """
        if name == "config.json" and not self.name.startswith("train"):
            return (damage.without_key, damage.other_value)[: 2 if self.name == "import" else 1]
        if self.name == "prepare/text":
            return (damage.delete, damage.directory)
        return (damage.flip,) if name == "model.safetensors" else ()


def _kind(path: str) -> str:
    """Return a path without numbers and hashes."""
    return (
        "".join(c for c in path if not c.isdigit() and c != "-").replace("abcdef", "")[:60]
        if "/d/" not in path
        else "d"
    )


class Scenes:
    """All scenes; their sources are created once below a directory."""

    def __init__(self, root: Path):
        self.root = root
        root.mkdir(parents=True)
        self._mounted: list[Path] = []
        self.blocks = support.write_blocks(root / "blocks")
        self.test_set = support.write_blocks(root / "held", seed=7, n_train=12)
        self.text = write_corpus(root / "text", documents=8, shards=2)
        self._runs()
        self._prepared()
        self._study()
        self._others()
        self.all = {scene.name: scene for scene in self._scenes()}

    def draw(self, draw: random.Random) -> Scene:
        """Draw a scene with files to damage."""
        scenes = [scene for scene in self.all.values() if scene.damaged]
        return draw.choices(scenes, [scene.weight for scene in scenes])[0]

    def draw_undamaged(self, draw: random.Random) -> Scene:
        """Draw a scene for a disturbance without damaged files."""
        chosen = {"fresh": 5, "fresh trunk": 3, "fresh builtin": 1, "train/half": 2, "prepare": 3, "evaluate": 1}
        chosen |= {"generate": 1, "study/partial": 1, "export": 1, "train/finished": 1}
        return self.all[draw.choices(list(chosen), list(chosen.values()))[0]]

    # ------------------------------------------------------------------------------------------------------------ made
    def _run_command(self, argv: Sequence[str], name: str, *, status: int = 0, **options: Any) -> None:
        ended = start(list(argv), self.root / f"log-{name}", **options).wait()
        assert ended.status == status, f"{name}: {ended}"

    def train(self, workdir: Path, blocks: Path | None = None, **settings: Any) -> list[str]:
        """Return the arguments of `seqjax train`."""
        values = SETTINGS | {"eval__path": f"('{self.test_set}',)"} | settings
        command = support.command(blocks or self.blocks, workdir, "transformer_pp", **values)
        return ["train", *command[3:]]

    def _runs(self) -> None:
        def stop_early() -> None:
            """Stop the run as a signal would, after some steps."""

            def agreed(self: Any) -> bool:
                self.agreed_on, self.name = support.n_rows(half) >= STOP, "SIGTERM"
                return self.agreed_on

            train_module.StopRequest.agreed = agreed

        half = self.root / "half"
        self._run_command(self.train(self.root / "finished"), "finished")
        self._run_command(self.train(half), "half", setup=stop_early)
        self._run_command(self.train(self.root / "other", train__seed=1), "other")
        self._run_command(self.train(self.root / "trunk", **TRUNK), "trunk")
        shutil.copytree(self.root / "trunk", self.root / "trunk-half")
        # As if killed in the second cooldown, before its first checkpoint.
        shutil.rmtree(self.root / "trunk-half" / "ends" / ENDS[1])
        self._run_command(self.builtin(self.root / "builtin"), "builtin")

    def builtin(self, workdir: Path, cache: Path | None = None) -> list[str]:
        """Return the arguments of `seqjax train` on the built-in corpus."""
        return self.train(
            workdir, data__corpus="builtin", data__path="", data__cache_dir=str(cache or self.root / "cache"),
            eval__path="()", train__steps=4,
        )  # fmt: skip

    def prepare(self, out: Path, source: Path | None = None) -> list[str]:
        """Return the arguments of `seqjax prepare`."""
        flags = [f"--source={source or self.text}", f"--out={out}", "--tokenizer=byte", "--seq_len=16"]
        return ["prepare", *flags, "--workers=1", "--strict"]

    def _prepared(self) -> None:
        self._run_command(self.prepare(self.root / "prepared"), "prepared")

        def killed_before_blocks() -> None:
            """Kill the process before it writes blocks."""
            from seqjax.data.prepare import run

            run._write = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)

        self._run_command(
            self.prepare(self.root / "parts"), "parts", setup=killed_before_blocks, status=-signal.SIGKILL
        )

    def _study(self) -> None:
        text = """
def get_study():
    here = {here!r}
    runs = {{
        "first": {{"workdir": f"{{here}}/finished", "model": "first"}},
        "second": {{"workdir": f"{{here}}/other", "model": "second"}},
    }}
    return {{
        "title": "two", "references": ("first",), "domains": ("arxiv", "github"), "against": ("commoncrawl", "c4"),
        "runs": runs,
    }}
"""
        self.study_text = text
        (self.root / "study.py").write_text(text.format(here=str(self.root)))
        self._run_command(
            ["study", f"--study={self.root / 'study.py'}", f"--out={self.root / 'results'}", "--partial"], "study"
        )
        trunks = self.root / "trunks.py"
        trunks.write_text(text.format(here=str(self.root)).replace("/finished", "/trunk").replace("/other", "/trunk-2"))
        self._run_command(self.train(self.root / "trunk-2", **{**TRUNK, "train__seed": 1}), "trunk-2")
        self._run_command(
            ["study", f"--study={trunks}", f"--out={self.root / 'results-trunks'}", "--partial"], "trunks"
        )

    def _others(self) -> None:
        setup, rng = SETUPS["demo"], random.Random(0)
        rows = []
        for model in ("Transformer++", "Mamba-2"):
            for task in setup.tasks[:2]:
                tests = {name: {"accuracy": rng.random(), "whole": rng.random()} for name in task.tests}
                rows.append(
                    {
                        "model": model,
                        "task": task.name,
                        "asked": setup.settings_hash(task.name),
                        "dim": 32,
                        "rate": 3.2e-3,
                    }
                    | {"seed": 0, "steps": task.steps, "batch_size": 64, "seconds": 1.5, "device": "cpu"}
                    | {"chance": 0.1, "parameters": 1000, "state": dict.fromkeys(task.tests, 100), "tests": tests}
                )
        (self.root / "recall").mkdir()
        path = self.root / "recall" / recall_report.RESULTS
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        finished, public = self.root / "finished", self.root / "public"
        self._run_command(["convert", "export", f"--workdir={finished}", f"--out={public}", "--weights_only"], "export")
        with_niah = shutil.copytree(finished, self.root / "with-niah")
        self._run_command(["niah", f"--workdir={with_niah}", *NIAH], "niah")

    # ---------------------------------------------------------------------------------------------------------- scenes
    def _scenes(self) -> list[Scene]:
        root = self.root
        run = lambda folder: folder / "run"  # noqa: E731
        results, copies = lambda folder: self.run_result(run(folder)), ("run",)
        train = lambda folder: self.train(run(folder))  # noqa: E731
        trunk = lambda folder: self.train(run(folder), **TRUNK)  # noqa: E731
        study = {"finished": root / "finished", "other": root / "other", "out": root / "results"}
        trunks = {"trunk": root / "trunk", "trunk-2": root / "trunk-2", "out": root / "results-trunks"}
        partial = lambda folder: ["study", f"--study={self._study_file(folder)}", f"--out={folder}/out", "--partial"]  # noqa: E731
        tables = lambda folder: _texts(folder / "out", "leaderboard.md")  # noqa: E731
        evaluate = lambda folder: ["evaluate", f"--workdir={folder}/run"]  # noqa: E731
        tokens = ("--prompt=ab", "--max_new_tokens=4", "--temperature=0")
        generate = lambda folder: ["generate", f"--workdir={folder}/run", *tokens]  # noqa: E731
        evaluated = lambda folder: _texts(folder / "run", "evaluation.json")  # noqa: E731
        on_blocks = lambda folder: self.train(run(folder), folder / "blocks")  # noqa: E731
        held = lambda folder: ["evaluate", f"--workdir={root}/finished", f"--data={folder}/held"]  # noqa: E731
        imported = lambda folder: ["convert", "import", f"--weights={folder}/public", f"--workdir={folder}/run"]  # noqa: E731
        export = ("convert", "export", "--weights_only")
        exported = lambda folder: [*export, f"--workdir={folder}/run", f"--out={folder}/public"]  # noqa: E731
        return [
            Scene("train/finished", {"run": root / "finished"}, train, copies, results, weight=3, runs=copies),
            Scene("train/half", {"run": root / "half"}, train, copies, results, weight=3, rows=STEPS, runs=copies),
            Scene("train/trunk", {"run": root / "trunk"}, trunk, copies, results, weight=2, runs=copies),
            Scene(
                "train/trunk half", {"run": root / "trunk-half"}, trunk, copies, results, weight=2, rows=STEPS,
                runs=copies,
            ),
            Scene("evaluate", {"run": root / "finished"}, evaluate, copies, evaluated, has_stdout=True, weight=2),
            Scene("evaluate/half", {"run": root / "half"}, evaluate, copies, evaluated, has_stdout=True),
            Scene("evaluate/trunk", {"run": root / "trunk"}, evaluate, copies, evaluated, has_stdout=True),
            Scene("evaluate/set", {"held": root / "held"}, held, ("held",), lambda folder: [], has_stdout=True),
            Scene("generate", {"run": root / "finished"}, generate, copies, lambda folder: [], has_stdout=True),
            Scene("generate/trunk", {"run": root / "trunk"}, generate, copies, lambda folder: [], has_stdout=True),
            Scene("fresh/blocks", {"blocks": root / "blocks"}, on_blocks, ("blocks",), results, weight=2),
            Scene(
                "fresh/builtin", {"cache": root / "cache"}, lambda p: self.builtin(run(p), p / "cache"), ("cache",),
                results, weight=2,
            ),
            Scene("fresh", {}, train, (), results, seconds=4, rows=STEPS, runs=copies),
            Scene("fresh trunk", {}, trunk, (), results, seconds=4, rows=STEPS, runs=copies),
            Scene("fresh builtin", {}, lambda p: self.builtin(run(p)), (), results, seconds=3, rows=4, runs=copies),
            Scene("prepare", {}, lambda p: self.prepare(p / "out"), (), lambda p: _contents(p / "out"), seconds=1),
            Scene(
                "prepare/parts", {"out": root / "parts"}, lambda p: self.prepare(p / "out"), ("out",),
                lambda p: _contents(p / "out"), weight=2, seconds=1,
            ),
            Scene(
                "prepare/whole", {"out": root / "prepared"}, lambda p: self.prepare(p / "out"), ("out",),
                lambda p: [fault_of_blocks(p / "out")], seconds=1,
            ),
            Scene(
                "prepare/text", {"text": root / "text"}, lambda p: self.prepare(p / "out", p / "text"), ("text",),
                lambda p: _contents(p / "out"), seconds=1,
            ),
            Scene("study/partial", study, partial, ("finished", "other", "out"), tables, has_stdout=True, weight=3),
            Scene("study/trunks", trunks, partial, ("trunk", "trunk-2", "out"), tables, has_stdout=True, weight=2),
            *(
                Scene(
                    f"study/analyse {name}", {"out": root / name}, lambda p: ["study", f"--analyse={p}/out"], ("out",),
                    tables, has_stdout=True, weight=2,
                )
                for name in ("results", "results-trunks")
            ),
            Scene(
                "recall", {"out": root / "recall"}, lambda p: ["recall", "--size=demo", f"--out={p}/out", "--report"],
                ("out",), lambda p: _texts(p / "out", "report.md"), has_stdout=True,
            ),
            Scene(
                "niah", {"run": root / "with-niah"}, lambda p: ["niah", f"--workdir={p}/run", *NIAH], copies,
                lambda p: _texts(p / "run", "niah.json"), has_stdout=True, weight=0.5,
            ),
            Scene("export", {"run": root / "finished"}, exported, copies, lambda p: _contents(p / "public")),
            Scene("import", {"public": root / "public"}, imported, ("public",), lambda p: _imported(p / "run")),
        ]  # fmt: skip

    def _study_file(self, folder: Path) -> Path:
        text = self.study_text.format(here=str(folder))
        if (folder / "trunk-2").exists():
            text = text.replace("/finished", "/trunk").replace("/other", "/trunk-2")
        (folder / "study.py").write_text(text)
        return folder / "study.py"

    # --------------------------------------------------------------------------------------------------------- results
    def run_result(self, workdir: Path) -> Any:
        """Return all results of a run that do not depend on timing; raise an error for damaged files."""
        result: dict[str, Any] = {}
        ends = sorted(path for path in workdir.glob("ends/*") if path.is_dir())
        for directory in (workdir, *ends):
            losses = eval_losses.read(directory)[1]
            result[directory.name if directory in ends else "run"] = {
                "rows": support.rows(directory),
                "losses": {
                    f"{step}": {d: x.tolist() for d, x in by_domain.items()} for step, by_domain in losses.items()
                },
                "files": sorted(path.name for path in (directory / "eval_losses").iterdir()),
            }
        classes = token_classes.read_classes(workdir)
        if classes is not None:
            sums = {d: {f: x.sum(0).tolist() for f, x in s.losses.items()} for d, s in classes.domains.items()}
            result["classes"] = {"step": classes.step, "sums": sums}
        result["manifest"] = read_json(workdir / "run.json", collect.METADATA)["manifest"]
        result["report"] = all((workdir / name).is_file() for name in ("report.md", "report.png"))
        result["state"] = [
            kills.fingerprint(d) for d in (workdir, *ends) if (d / "checkpoints").exists() and d == workdir
        ]
        result["points"] = [point.step for d in (ends or [workdir]) for point in collect.read_points(d)]
        return result

    def fault_of_run(self, workdir: Path) -> str:
        """Return the fault of a finished run with any settings, or ""."""
        rows = metrics.read(workdir)
        config, _, _, step, _ = restore(workdir)
        if step != config.train.steps or rows[-1]["step"] != step:
            return f"it ended at step {step} of {config.train.steps}"
        numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
        return "" if all(map(math.isfinite, numbers)) else "a value is not finite"

    # ---------------------------------------------------------------------------------------------- moments and mounts
    def phase(self, scene: Scene, folder: Path, log: Path, *, has_begun: bool) -> str:
        """Return the phase of a running command."""
        if not has_begun:
            return "imports"
        if not scene.runs:
            return "another command"
        workdir = folder / scene.runs[0]
        if any((workdir / "ends").glob("*")):
            return "cooldowns"
        text = log.read_text(encoding="utf-8", errors="replace")
        if not any(mark in text for mark in MARKS):
            return "data and model"
        phase = kills.current_phase(workdir, 0)
        rows = support.rows(workdir) if phase != "compilation" else []
        return "report" if rows and rows[-1]["step"] == STEPS and "train/lr" not in rows[-1] else phase

    def mount(self, target: Path, *options: str) -> None:
        """Mount a file system for an attack; needs root."""
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *options, str(target)], check=True, capture_output=True)
        self._mounted.append(target)

    def unmount(self, folder: Path) -> None:
        """Unmount all file systems below a directory."""
        for target in [path for path in self._mounted if path.is_relative_to(folder)]:
            for _ in range(50):
                if subprocess.run(["umount", str(target)], check=False, capture_output=True).returncode == 0:
                    break
                time.sleep(0.1)  # a process may still have a file open
            self._mounted.remove(target)


NIAH = ("--lengths=600", "--samples=1")


def fault_of_blocks(directory: Path) -> str:
    """Return a description of a block file that differs from its manifest, or ""."""
    manifest = read_manifest(directory)
    for domains in manifest["splits"].values():
        for entry in domains.values():
            for file in entry["files"]:
                path = directory / file["path"]
                if not path.is_file() or path.stat().st_size != file["bytes"]:
                    return f"{file['path']} is missing or has another size"
    return ""


def _contents(directory: Path) -> dict[str, str]:
    """Return a hash of each file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {p.relative_to(directory).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in files}


def _texts(directory: Path, *names: str) -> list[str]:
    return [(directory / name).read_text(encoding="utf-8") for name in names]


def _imported(workdir: Path) -> Any:
    config, _, params, step, _ = restore(workdir)
    return [step, str(config.model), support.digest(jax.device_get(params))]
