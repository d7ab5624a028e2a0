"""The remedies in errors about studies, judgements and launch scripts are followed."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import train_step
from seqjax.errors import UserError
from seqjax.study.judge import plan as plans
from seqjax.study.report import results, words
from seqjax.study.runs import collect, files, identity, runner, studies
from seqjax.study.runs.record import Record
from seqjax.training import eval_losses
from seqjax.training import workdir as workdirs
from tests import support
from tests.remedies.follow import write
from tests.remedies.support import GOLDEN, Case, Commands, follow_case, unpack_run

STUDY = """
def run(name, workdir="", settings="", **more):
    return {"workdir": workdir or name, "config": f"{name}:debug{settings}"} | more

def get_study():
    return {"title": "two", "references": ("gla",), "domains": ("arxiv",), "runs": {
        "fox": run("fox"), "gla": run("gla"),
    }}
"""
# What is wrong in the study file, the advice in its error, and what follows it: a text of `STUDY` becomes another.
Edit = tuple[str, str]
STUDIES: dict[str, tuple[Edit, str, Edit]] = {
    "no dict": (("return {", "return 3 or {"), r"must return a (?P<kind>dict)", ("return {", "return {")),
    "an unknown field": (
        ('"title"', '"titel"'),
        r"its fields are (?P<field>title)",
        ('"title"', '"{field}"'),
    ),
    "an unknown unit": (
        ('"title"', '"unit": "bits", "title"'),
        "unit is '(?P<unit>nats)'",
        ('"title"', '"unit": "{unit}", "title"'),
    ),
    "bits without held-out domains": (
        ('"title"', '"unit": "bits_per_byte", "title"'),
        "name held-out domains in `(?P<field>against)`",
        ('"title"', '"unit": "bits_per_byte", "{field}": ("c4",), "title"'),
    ),
    "an unknown field of a run": (
        ('run("fox")', 'run("fox", sede=1)'),
        r"the fields of a run are .*(?P<field>seed)",
        ('run("fox")', 'run("fox", {field}=1)'),
    ),
    "references as a text": (('("gla",)', '"gla"'), "must be a (?P<kind>tuple)", ('("gla",)', '{kind}(["gla"])')),
    "a reference without a run": (('("gla",)', '("gal",)'), "no run trains the references", ('("gla",)', '("gla",)')),
    "a schedule of a run with ends": (
        ('run("fox")', 'run("fox", settings=",train.ends=(0.5,1.0)", schedule=0.5)'),
        r"'fox': leave out (?P<field>schedule)",
        ('run("fox")', 'run("fox", settings=",train.ends=(0.5,1.0)")'),
    ),
    "a speed of an unknown model": (
        ('"title"', '"speeds": {"here": {"fxo": 3}}, "title"'),
        r"names \['fxo'\], but no run has this model",
        ('"title"', '"speeds": {"here": {"fox": 3}}, "title"'),
    ),
    "two runs in one workdir": (
        ('run("fox")', 'run("fox", "gla")'),
        "have the same (?P<field>workdir); give each run different ones",
        ('run("fox")', 'run("fox", {field}="other")'),
    ),
    "two runs of the same settings": (
        ('run("fox")', 'run("gla", "other")'),
        "have the same settings; give each run different ones",
        ('run("fox")', 'run("gla", "other", ",model.dim=32")'),
    ),
    "two runs of one model and seed": (
        ('run("fox")', 'run("fox"), "again": run("fox", "again", ",model.dim=32", model="fox")'),
        "have the same model, (?P<field>seed), rate and schedule",
        ('run("fox")', 'run("fox"), "again": run("fox", "again", ",model.dim=32,data.seed=1", model="fox", {field}=1)'),
    ),
    "a seed of other data": (
        ('run("fox")', 'run("fox", settings=",data.seed=3")'),
        r"runs with the same seed must have the same (?P<key>data\.seed)",
        ('run("fox")', 'run("fox", settings=",{key}=0")'),
    ),
    "a rate that does not agree": (
        ('run("gla")', 'run("gla"), "2": run("gla", "2", ",data.seed=1", model="gla", seed=1, rate=2.0)'),
        "Set `(?P<field>rate)` to optim.lr divided by the study's common",
        ('run("gla")', 'run("gla"), "2": run("gla", "2", ",data.seed=1", model="gla", seed=1, {field}=1.0)'),
    ),
    "a title with a line feed": (('"two"', '"two\\n"'), "control characters; leave them out", ('"two"', '"two"')),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_file_as_the_error_advises(tmp_path: Path, name: str):
    wrong, advice, right = STUDIES[name]
    path = tmp_path / "study.py"
    write(path, STUDY.replace(*wrong))
    with pytest.raises(UserError) as error:
        studies.load_study(path)
    match = re.search(advice, str(error.value))
    assert match, error
    to = right[1]
    for field, value in match.groupdict().items():
        to = to.replace(f"{{{field}}}", value)
    write(path, STUDY.replace(right[0], to))
    assert len(studies.load_study(path).runs) >= 2


# As in tests/remedies/test_commands.py; DIR/wsd is a finished study.
JUDGE = "judge --config=gla:debug --dry_run --rates=1e-3,2e-3 --seeds=1"
COMPARE = "--compare 'Gated DeltaNet' 'Transformer++, QK norm'"
COMMANDS: list[tuple[str, str, str, str]] = [
    ("study --list", r"(?P<to>--configs=A,B)", "--list", "--out"),
    ("study --list --configs=gla:debug,fox:debug", "needs (?P<add>--out)=DIR", "", ""),
    (
        "study --list --out=DIR/x --configs=gla:debug",
        r"name at least two (?P<to>configs)",
        "configs=gla:debug",
        "--config",
    ),
    (
        "study --list --out=DIR/x --configs=gla:debug,fox:debug --seeds=0",
        r"(?P<option>--\w+) .* least (?P<value>\d)",
        "",
        "",
    ),
    ("study --study=DIR/two.py --list --jobs=0", r"(?P<option>--\w+) must be at least (?P<value>\d)", "", ""),
    ("study --study=DIR/two.py --list --page", r": (?P<to>--analyse=DIR --page)\.", "--page", "leave out"),
    (f"study --analyse=DIR/wsd {COMPARE} --list", "leave out the other(?P<to>) arguments", " --list", ""),
    (f"study --analyse=DIR/wsd {COMPARE} --out=DIR/x", "leave out --study and (?P<drop>--out)", "", ""),
    (f"{JUDGE} --jobs=0", r"(?P<option>--\w+) must be at least (?P<value>\d)", "", ""),
    (JUDGE.replace("seeds=1", "seeds=0"), r"(?P<option>--\w+) must be (?P<value>\d) to", "", ""),
    (JUDGE.replace("1e-3,2e-3", "1e-3,1e-3"), "above 0, each named (?P<to>once)", "1e-3,1e-3", "such as"),
    (JUDGE.replace("1e-3,2e-3", "once"), r"such as (?P<to>[\d,e-]+)\.", "once", ""),
    (f"{JUDGE} --match=all", "it is (?P<to>params) or", "all", ""),
    (
        f"{JUDGE} --match=params".replace("debug", "debug,model.mlp.kind=none"),
        "give --match=(?P<to>none)",
        "params",
        "",
    ),
    (JUDGE.replace("debug", "debug,mixed"), "as in the regime (?P<to>limited)", "mixed", ""),
]


@pytest.mark.parametrize(("line", "advice", "old", "then"), COMMANDS)
def test_a_command_as_the_error_advises(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, advice: str, old: str, then: str
):
    monkeypatch.setattr("seqjax.study.judge.__main__.dry_run", lambda plan, jobs: "")
    shutil.copytree(GOLDEN / "studies" / "wsd", tmp_path / "wsd")
    commands.follow(line, advice, old, then)


# ------------------------------------------------------------------------------------------------ the files of a study
def _study(root: Path) -> Path:
    shutil.copytree(GOLDEN / "studies" / "wsd", root / "run")
    shutil.copytree(root / "run", root / "copy")
    return root / "run"


def _replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        path = _study(root) / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return spoil


def _read(root: Path) -> Any:
    return files.read(root / "run")


def _copy_back(root: Path, match: re.Match[str]) -> None:
    name = Path(match["path"]).relative_to(root / "run")
    shutil.copy(root / "copy" / name, root / "run" / name)


def _of_run(root: Path, workdir: str = "run", **changed: Any) -> runner.Run:
    config = workdirs.load_config(root / "copy")
    optim = dataclasses.replace(config.optim, **changed)
    return runner.Run(0, "gla", root / workdir, dataclasses.replace(config, optim=optim), "gla")


def _with_copy(root: Path) -> None:
    shutil.copytree(unpack_run(root), root / "copy")


def _without_config(root: Path) -> None:
    _with_copy(root)
    write(root / "run" / "run.json", '{"identity": "0"}')
    (root / "run" / "config.json").unlink()


def _ends_without_config(root: Path) -> None:
    _with_copy(root)
    (root / "run" / "ends").mkdir()
    (root / "run" / "config.json").unlink()


def _without_evaluation(root: Path) -> None:
    _with_copy(root)
    path = root / "run" / "metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "eval/" not in line))


def _tokenizers(*names: str) -> Any:
    def attempt(root: Path, unit: str = "nats") -> Any:
        runs = [runner.Run(i, name, root / name, None, name) for i, name in enumerate(names)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                collect, "_collect", lambda run, unit: Record(run.label, "", 0, 1.0, 1.0, [], [], _of(run.label))
            )
            return collect.collect(runs, [], unit=studies.UNITS[unit])

    return attempt


def _require_named(missing: dict[str, str], label: str) -> None:
    assert label in missing


def _of_ends(root: Path) -> studies.Study:
    with zipfile.ZipFile(GOLDEN / "workdirs" / "ends.zip") as packed:
        packed.extractall(root / "run")
    return studies.Study("", ("gla",), (), [runner.Run(0, "gla", root / "run", None, "gla")])


def _edited_loss(root: Path) -> None:
    _with_copy(root)
    path = root / "run" / "metrics.jsonl"
    path.write_text(re.sub(r'("eval/\w+/loss": )\d', r"\g<1>9", path.read_text()))


def _means(root: Path) -> None:
    run = runner.Run(0, "gla", root / "run", None, "gla")
    _, losses = eval_losses.read(root / "run")
    files._require_means(collect.collect([run], [])[0], losses, run.workdir)


def _stored(root: Path, *, out: str = "out", label: str = "gla", lr: float = 9.0) -> Any:
    """Read results of the run `gla` for a study with another learning rate."""
    config = json.loads((root / "copy" / "config.json").read_text())
    for name in ("runs.json", "points.csv"):
        write(root / "out" / name, "")
    record = Record("gla", "gla", 0, 1.0, 1.0, [], [], {"config": config})
    study = studies.Study("", ("gla",), (), [dataclasses.replace(_of_run(root, lr=lr), label=label)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "read_runs", lambda out: [record])
        return results._stored(study, root / out, [label])


def _of(tokenizer: str) -> dict[str, Any]:
    return {"config": {"data": {"tokenizer": tokenizer}}}


FILES: dict[str, Case] = {
    "no loss on a domain": (
        _replaced("points.csv", ",arxiv,", ",arixv,"),
        _read,
        r"(?P<path>\S+points\.csv) lacks losses .* put back a copy",
        _copy_back,
    ),
    "a run of another study": (
        _replaced("points.csv", '\n"Gated DeltaNet, rate 0.001"', "\nmine"),
        _read,
        r"(?P<path>\S+points\.csv) has a run .* put back a copy",
        _copy_back,
    ),
    "no domain": (
        _replaced("runs.json", '"domains": ["arxiv", "github", "stackexchange"]', '"domains": []'),
        _read,
        r"(?P<path>\S+runs\.json) has no domain.* put back a copy",
        _copy_back,
    ),
    "an edited loss": (
        _replaced("points.csv", ",commoncrawl,3.396795", ",commoncrawl,3.296795"),
        _read,
        r"(?P<name>points\.csv) has commoncrawl.* put back a copy",
        lambda root, match: shutil.copy(root / "copy" / match["name"], root / "run" / match["name"]),
    ),
    "a run with other settings, put back": (
        _with_copy,
        lambda root: identity.require(_of_run(root, lr=9.0)),
        r"optim\.(?P<key>lr): (?P<was>\S+) -> .* put back the settings",
        lambda root, match: lambda: identity.require(_of_run(root, "run", **{match["key"]: float(match["was"])})),
    ),
    "a run with other settings, elsewhere": (
        _with_copy,
        lambda root: identity.require(_of_run(root, lr=9.0)),
        "Give this run another (?P<key>workdir)",
        lambda root, _: lambda: identity.require(_of_run(root, "new", lr=9.0)),
    ),
    "a run without its config": (
        _without_config,
        lambda root: identity.require(_of_run(root)),
        r"(?P<path>\S+/config\.json) is missing; put back this run",
        _copy_back,
    ),
    "ends without their config": (
        _ends_without_config,
        lambda root: dataclasses.replace(_of_run(root), config=None).ends,
        r"(?P<path>\S+/config\.json) is missing, .* Put back a copy",
        _copy_back,
    ),
    "a run without an evaluation": (
        _without_evaluation,
        lambda root: collect.read_points(root / "run"),
        r"let it reach its first \(config\.(?P<key>eval\.every)\)",
        lambda root, _: shutil.copy(root / "copy" / "metrics.jsonl", root / "run"),
    ),
    "runs of different tokenizers": (
        lambda _: None,
        _tokenizers("byte", "mixtral"),
        'Set unit="(?P<unit>\\w+)" in the study file',
        lambda root, match: lambda: _tokenizers("byte", "mixtral")(root, match["unit"]),
    ),
    "a run that lacks an end": (
        _of_ends,
        lambda root: collect.collect(_of_ends(root).runs, []),
        r"has no evaluation at the end after step 12 .* with (?P<option>--partial)",
        lambda root, _: lambda: _require_named(results.unfinished(_of_ends(root)), "gla"),
    ),
    "an edited loss of a run": (
        _edited_loss,
        _means,
        r"(?P<name>metrics\.jsonl) has .*put back a copy",
        lambda root, match: shutil.copy(root / "copy" / match["name"], root / "run" / match["name"]),
    ),
    "results of other settings, elsewhere": (
        _with_copy,
        _stored,
        "another (?P<option>--out)",
        lambda root, _: lambda: _stored(root, out="new"),
    ),
    "results of other settings, another label": (
        _with_copy,
        _stored,
        "or the run another (?P<key>label)",
        lambda root, _: lambda: _stored(root, label="gla 2"),
    ),
    "a study joined twice": (
        _study,
        lambda root: files.join(root / "run", {root / "copy": files.read_runs(root / "copy")}),
        "join each directory (?P<n>once)",
        lambda root, _: lambda: files.join(root / "run", {}),
    ),
    "a study of other data": (
        _study,
        lambda root: files.united(_read(root), [files.read(GOLDEN / "studies" / "protocol_2")]),
        "join only studies with the same (?P<what>data)",
        lambda root, _: lambda: files.united(_read(root), [files.read(root / "copy")]),
    ),
    "a model against itself": (
        _study,
        lambda root: words.find(_read(root), "Mamba-2", "Mamba-2"),
        "name another reference of (?P<name>[^;]+);",
        lambda root, match: lambda: words.find(_read(root), "Mamba-2", match["name"]),
    ),
    "a study file of other content": (
        lambda root: write(root / "run" / "study.py", STUDY),
        lambda root: studies.write_study(["gla:debug", "fox:debug"], seeds=1, out=root / "run"),
        r"run it with --study=(?P<path>\S+),",
        lambda _, match: lambda: studies.load_study(match["path"]),
    ),
    "a study file of other content, elsewhere": (
        lambda root: write(root / "run" / "study.py", STUDY),
        lambda root: studies.write_study(["gla:debug", "fox:debug"], seeds=1, out=root / "run"),
        "another (?P<option>--out)",
        lambda root, _: lambda: studies.write_study(["gla:debug", "fox:debug"], seeds=1, out=root / "new"),
    ),
    "a judgement's directory with another study": (
        lambda root: write(root / "run" / "study.py", STUDY),
        lambda root: plans.Runs(_plan(root)),
        "another (?P<option>--out)",
        lambda root, _: lambda: plans.Runs(_plan(root, out="new")),
    ),
    "a judged config without an argument": (
        lambda root: write(root / "mine.py", _judged(arg="").replace("arg, ", "'debug', ")),
        lambda root: _plan(root, str(root / "mine.py")),
        r"let it take one and pass it on, get_config\((?P<arg>arg)\) and presets\.get_config\(arg",
        lambda root, match: write(root / "mine.py", _judged(arg=match["arg"])),
    ),
    "a judged config of no known size": (
        lambda root: write(root / "mine.py", _judged("huge")),
        lambda root: _plan(root, str(root / "mine.py")),
        "needs one of .*(?P<size>debug)",
        lambda root, match: write(root / "mine.py", _judged(match["size"])),
    ),
    "a judged config that changes its size": (
        lambda root: write(root / "mine.py", _judged("huge")),
        lambda root: _plan(root, f"{root / 'mine.py'}:demo"),
        "needs one of .*(?P<size>debug)",
        lambda root, match: write(root / "mine.py", _judged(match["size"])),
    ),
    "a judged size without rates": (
        lambda _: None,
        lambda root: _plan(root, "gla:1b3", rates=()),
        "give two to try, (?P<option>--rates)=A,B",
        lambda root, _: lambda: _plan(root, "gla:1b3", needs_data=False),
    ),
    "a study named twice": (
        _study,
        lambda root: _plan(root, runs=[root / "run", root / "run"]),
        "name each directory (?P<n>once)",
        lambda root, _: lambda: _plan(root),
    ),
}
CONFIG = """
from seqjax import presets
def get_config(arg=''):
    config = presets.get_config(arg, name='mine', mixer={'name': 'gla'})
    config.size = SIZE or config.size
    return config
"""


def _judged(size: str = "", *, arg: str = "arg=''") -> str:
    return CONFIG.replace("SIZE", repr(size)).replace("arg=''", arg)


def _plan(root: Path, config: str = "gla:debug", *, out: str = "run", rates: Any = (1e-3, 2e-3), **options: Any) -> Any:
    return plans.make_plan(config, out=root / out, cache=root / "cache", rates=rates, **options)


@pytest.mark.parametrize("name", FILES)
def test_files_as_the_error_advises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    follow_case(tmp_path, FILES[name])


def test_jobs_as_the_error_advises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["0", "1"])
    with pytest.raises(UserError, match=r"Give --jobs=2\.") as error:
        runner.train_all("", [], jobs=3)
    match = re.search(r"--jobs=(\d+)\.", str(error.value))
    assert match and runner.train_all("", [], jobs=int(match[1])) == []


def test_devices_of_a_benchmark_as_the_error_advises():
    with pytest.raises(UserError, match=r"give 2 to \d+") as error:
        train_step.check_devices(99, ["data"])
    match = re.search(r"give (\d+) to (\d+)", str(error.value))
    assert match and int(match[2]) == jax.device_count()
    for n in match.groups():
        train_step.check_devices(int(n), ["data"])


# ------------------------------------------------------------------------------------------------------ launch scripts
RUN = ["--config=gla:debug", "--workdir=w"]
GKE = ["--cluster=c", "--workload=w", "--device=d", "--image=i"]
TPU = ["--name=n", "--zone=z", "--type=t", "--version=v", "--wheel=w"]
# A script, its arguments, the advice in the error, and the arguments that follow it.
SCRIPTS: list[tuple[str, list[str], str, list[str]]] = [
    ("local.sh", [], r"launch/local\.sh (?P<config>--config=\S+)", ["{config}"]),
    ("local.sh", ["--gpus=0", *RUN], "give (?P<gpus>--gpus=1) or more", ["{gpus}", *RUN]),
    ("gke.sh", ["x", *GKE, "--", *RUN], r"put arguments .* after (?P<mark>--)\.", [*GKE, "{mark}", "x", *RUN]),
    ("gke.sh", [*GKE[1:], "--", *RUN], "(?P<option>--cluster)= is missing", ["{option}=c", *GKE[1:], "--", *RUN]),
    ("gke.sh", [*GKE, "--"], r"give (?P<first>--config)=\S+ and (?P<second>--workdir)=", [*GKE, "--", *RUN]),
    ("tpu_vm.sh", ["x", *TPU, "--", *RUN], r"put arguments .* after (?P<mark>--)\.", [*TPU, "{mark}", "x", *RUN]),
    ("tpu_vm.sh", [*TPU[1:], "--", *RUN], "(?P<option>--name)= is missing", ["{option}=n", *TPU[1:], "--", *RUN]),
    ("tpu_vm.sh", [*TPU, "--"], r"give (?P<first>--config)=\S+ and (?P<second>--workdir)=", [*TPU, "--", *RUN]),
    ("slurm.sbatch", [], r"what to train, (?P<config>--config=\S+)", ["{config}"]),
    ("slurm_study.sbatch", [], r"which study: (?P<study>--study=\S+)", ["{study}"]),
]


@pytest.mark.parametrize(("script", "wrong", "advice", "right"), SCRIPTS)
def test_a_script_as_the_error_advises(script: str, wrong: list[str], advice: str, right: list[str]):
    def started(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        return support.run(["bash", str(support.ROOT / "launch" / script), "--dry_run", *arguments])

    failed = started(wrong)
    match = re.search(advice, failed.stderr)
    assert match and failed.returncode == 2, failed.stderr
    done = started([word.format(**match.groupdict()) for word in right])
    assert done.returncode == 0 and done.stdout, done.stderr


def test_a_study_script_without_an_array_as_the_error_advises(tmp_path: Path):
    write(tmp_path / "srun", '#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    command = ["bash", str(support.ROOT / "launch" / "slurm_study.sbatch"), "--study=s"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    match = re.search(r"sbatch --array=0-(\d+)", support.run(command, env=env).stderr)
    assert match
    done = support.run(command, env=env | {"SLURM_ARRAY_TASK_ID": match[1]})
    assert f"--only={match[1]}" in done.stdout, done.stderr
