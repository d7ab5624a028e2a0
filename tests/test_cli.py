"""The `seqjax` command: help and mistyped arguments; each error is one line that names the fix, with status 2."""

import dataclasses
import errno
import importlib
import os
import re
import runpy
import subprocess
import sys

import jax
import pytest

import seqjax
from kernels_pallas import BackendError
from seqjax import command_line
from seqjax.commands import cli, train
from seqjax.config import Config, settings
from seqjax.config.parse import is_mixer
from seqjax.errors import UserError
from seqjax.fields import hints_of
from tests import support

MINE = """
from seqjax import presets

def get_config(arg=""):
    {line}
    return presets.get_config(arg, name="mine", base="top1_chunk")
"""


def module_of(command):
    return importlib.import_module(cli.COMMANDS[command][0])


def test_help_imports_neither_jax_nor_numpy(tmp_path):
    """An unknown command imports neither as well."""
    code = (
        "import sys; from seqjax.commands import cli; cli.run(['--help']); cli.run(['--version']);\n"
        "try: cli.run(['trian'])\n"
        "except SystemExit as end: print(end.code, 'jax' in sys.modules, 'numpy' in sys.modules)"
    )
    env = {**support.environment(), "PYTHONPATH": str(support.ROOT)}
    done = support.run([sys.executable, "-c", code], env=env, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[-1] == "2 False False"
    assert lines[-2] == f"seqjax {seqjax.__version__}"
    assert done.stderr.startswith("error: There is no command 'trian'. Did you mean 'train'?")
    for command in cli.COMMANDS:
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_every_command(command, capsys):
    with pytest.raises(SystemExit) as caught:
        module_of(command).main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: seqjax {command} ")
    assert f"seqjax {command} -" in out.partition("\n")[2] or command == "convert"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_wrong_arguments_of_every_command_are_user_errors(command):
    for argv in (["--no_such_option=1"], ["stray"], []):
        with pytest.raises(UserError):
            module_of(command).main(argv)


def keys(cls, prefix=""):
    """Yield every setting of a dataclass."""
    for field, hint in zip(dataclasses.fields(cls), hints_of(cls).values(), strict=True):
        if is_mixer(hint):
            yield f"{prefix}{field.name}.name"
        elif dataclasses.is_dataclass(hint):
            yield from keys(hint, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_help_lists_every_setting():
    lines = settings.help_text().splitlines()
    for key in keys(Config):
        assert any(line.startswith(f"  --config.{key}=") for line in lines), key
    text = " ".join(" ".join(lines).split())
    assert "--config.data.corpus=auto|builtin|blocks|stream|tfds ('builtin')" in text
    assert "--config.optim.clip_norm=FLOAT or None (1.0) global norm" in text
    assert "--config.train.steps=INT (no default)" in text
    assert "--config.data.weights=(FLOAT, ...) (()) share of" in text
    start = lines.index("  settings of the mixer top1_chunk (--config.model.mixer.KEY):")
    for name in support.fields("top1_chunk") - {"name"}:
        assert any(line.startswith(f"  --config.model.mixer.{name}=") for line in lines[start:]), name


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("train.steps=3", "train.steps=3: write --config.train.steps=3."),
        ("config.train.steps=3", "write --config.train.steps=3."),
        ("--train.steps=3", "write --config.train.steps=3."),
        ("--model.mixer[1].heads=4", r"write --config.model.mixer\[1\].heads=4."),
        ("--optim.lr", "write --config.optim.lr=VALUE."),
        ("workdir=runs/x", "workdir=runs/x: write --workdir=runs/x."),
        ("--wrokdir=runs/x", r"wrokdir.*--workdir"),
        ("top1_chunk", "top1_chunk: .*--NAME=VALUE.*`seqjax train --help`"),
        ("--dim=3", r"--dim=3: write --config\.model\.dim=3 or --config\.model\.mlp\.dim=3\."),
        ("--heads", r"--heads: write --config\.model\.mixer\.heads\."),
        ("--config.train.lr=1", r"'lr'.*optim\.lr"),
        ("--config.log={}", r"log=\{\}: config\.log .*log\.every="),
        ("--config.lr=1", r"'lr'.*optim\.lr"),
        ("--config.train.step=1", r"'step'.*'steps'"),
        ("--workdir", "--workdir.*`seqjax train --help`"),
    ],
)
def test_mistyped_arguments_name_the_fix(word, says):
    with pytest.raises(UserError, match=says):
        train.main(["--config=top1_chunk:debug", word])


@pytest.mark.parametrize(
    ("command", "option"),
    [("train", "config"), ("evaluate", "workdir"), ("generate", "workdir"), ("prepare", "source"), ("study", "study")],
)
def test_a_bare_argument_suggests_the_main_option(command, option):
    with pytest.raises(UserError, match=rf"^a/b: write --{option}=a/b\. See `seqjax {command} --help`\."):
        module_of(command).main(["a/b"])


@pytest.mark.parametrize("word", ["train.steps=3", "workdir=runs/x"])
def test_a_bare_assignment_suggests_its_option(word):
    name = "config." if word.startswith("train") else ""
    with pytest.raises(UserError, match=rf"^{word}: write --{name}{word}\."):
        train.main([word])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("arg = nonsense", r"mine\.py, line 5: NameError: .*'nonsense'"),
        ("arg = = 1", r"mine\.py, line 5: .*syntax"),
        ("return presets.get_config(arg)", r"mine\.py, line 5: TypeError: .*'name'"),
    ],
)
def test_errors_in_a_user_config_name_its_line(tmp_path, line, says):
    (tmp_path / "mine.py").write_text(MINE.format(line=line))
    with pytest.raises(UserError, match=says):
        train.main([f"--config={tmp_path / 'mine.py'}:debug"])


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "4"}, True),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, True),
    ],
)
def test_several_slurm_tasks_without_distributed_are_refused(environment, refused, monkeypatch):
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    says = "SLURM.*4 .*--distributed" if refused else "no_such_config"
    with pytest.raises(UserError, match=says):
        train.main(["--config=no_such_config"])


def test_wrong_return_types_of_configs_and_studies_are_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def get_config(arg=''):\n    return 3\n\ndef get_study():\n    return 4\n")
    with pytest.raises(UserError, match=r"get_config .*mine\.py .*ConfigDict.*3"):
        train.main([f"--config={path}:debug"])
    with pytest.raises(UserError, match=r"mine\.py: get_study\(\) .*dict.*4"):
        module_of("study").main([f"--study={path}", "--list"])


@pytest.mark.parametrize(
    ("command", "option"),
    [("prepare", "--workers"), ("prepare", "--min_tokens"), ("prepare", "--max_tokens"), ("evaluate", "--tokens")],
)
def test_negative_numbers_are_refused(command, option):
    needed = {"prepare": ["--source=a", "--out=b", "--tokenizer=byte"], "evaluate": ["--workdir=a"]}[command]
    with pytest.raises(UserError, match=f"{option} .*-1"):
        module_of(command).main([*needed, f"{option}=-1"])


def test_studies_are_selected_by_name(capsys):
    module_of("study").main(["--study=figure3d:demo", "--list"])
    assert "W=128" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"figur3d.*'figure3d'"):
        module_of("study").main(["--study=figur3d", "--list"])
    with pytest.raises(UserError, match=r"transformer\.py .*get_study"):
        module_of("study").main(["--study=transformer", "--list"])


@pytest.mark.parametrize(
    ("command", "argv", "says"),
    [
        (
            "prepare",
            ["--source=a", "--out=b", "--tokenizer=bite"],
            r"^--tokenizer=bite .*'byte'",
        ),
        ("convert", [], r" import\|export\b"),
    ],
)
def test_errors_name_the_option_as_typed(command, argv, says):
    with pytest.raises(UserError, match=says):
        module_of(command).main(argv)


def test_a_refused_run_leaves_no_directory(tmp_path, monkeypatch):
    """Without --workdir, files from before the first step are deleted; a run that has started stays."""
    monkeypatch.chdir(tmp_path)
    begun = ["metrics.jsonl"]

    def refuse(config, workdir, *, weights):
        for name in begun:
            (workdir / name).touch()
        raise BackendError("no kernel can run")

    monkeypatch.setattr("seqjax.training.loop.train", refuse)
    for n_left in (0, 1):
        with pytest.raises(BackendError):
            train.main(["--config=top1_chunk:debug"])
        assert len([*(tmp_path / "runs").iterdir()]) == n_left
        begun.append("config.json")


def test_a_missing_package_is_named(monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError("No module named 'absl.logging'", name="absl.logging")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    with pytest.raises(SystemExit) as ended:
        cli.run(["train", "--config=top1_chunk"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: The package absl is not installed.")


ENDINGS = [("", 141), (">/dev/full", 2), (">&-", 0)]
UNWRITTEN = [(argv, *end) for argv in ("--help", "evaluate --help", "trian") for end in ENDINGS]


@pytest.mark.parametrize(
    ("argv", "where", "status"),
    support.slow_unless(lambda argv, where, _: argv == "--help" or where == ">/dev/full", UNWRITTEN),
)
def test_unwritable_output_sets_the_status(tmp_path, argv, where, status):
    """A closed reader, a full disk and a closed stdout: a status and at most one line."""
    command = ["sh", "-c", f'exec "$@" {where}', "sh", sys.executable, "-m", "seqjax", *argv.split()]
    environment = support.environment() | {"PYTHONPATH": str(support.ROOT)}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path, timeout=120,
        env=environment,
    )  # fmt: skip
    os.close(writer)
    if argv == "trian":  # writes only to stderr
        assert done.returncode == 2 and done.stderr.startswith("error: There is no command 'trian'")
        return
    assert done.returncode == status, done.stderr
    assert re.fullmatch(r"error: .*No space left.*\n" if "full" in where else "", done.stderr)


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "2>&1 >/dev/full"])
def test_unwritable_messages_do_not_end_the_command(tmp_path, where):
    """Status lines, warnings and errors do not change the command's status."""
    code = (
        "import sys; from absl import logging; from seqjax import command_line, terminal\n"
        "with command_line.reporting():\n"
        "    for i in range(3): terminal.StatusLine(log_seconds=0).show(str(i)); logging.warning('w'); print(i)\n"
        "    if len(sys.argv) > 1: raise command_line.UserError('x')\n"
    )
    env = support.environment() | {"PYTHONPATH": str(support.ROOT)}
    for words, status in ((["ends"], 2), ([], 2 if ">/" in where.partition("1")[2] else 0)):
        command = ["sh", "-c", f'exec "$@" {where}', "sh", sys.executable, "-c", code, *words]
        done = support.run(command, env=env, cwd=tmp_path)
        assert done.returncode == status, done.stderr
        if where.startswith("2>/") or where == "2>&-":
            assert (done.stdout, done.stderr) == ("0\n1\n2\n", "")


@pytest.mark.parametrize(
    "call", ["sys.exit(0)", "sys.exit()", "raise SystemExit('x')", "exit(0)", "raise BaseException('x')"]
)
def test_a_config_that_exits_is_an_error(tmp_path, call, capsys):
    """With status 0, a script would continue as after a success."""
    (tmp_path / "mine.py").write_text(f"import sys\n\ndef get_config(arg=''):\n    {call}\n")
    for command in ("train", "judge"):
        with pytest.raises(SystemExit) as ended:
            cli.run([command, f"--config={tmp_path / 'mine.py'}:debug"])
        assert ended.value.code == 2
        assert re.fullmatch(r"error: .*mine\.py, line 4: .*\n", capsys.readouterr().err)


def test_a_mixer_that_exits_is_an_error(tmp_path, capsys):
    """Its code runs inside JAX tracing."""
    (tmp_path / "mixer.py").write_text("import sys\n\ndef call(x):\n    sys.exit(0)\n")
    call = runpy.run_path(str(tmp_path / "mixer.py"))["call"]
    with pytest.raises(SystemExit) as ended, command_line.reporting():
        jax.eval_shape(call, 1.0)
    assert ended.value.code == 2
    assert re.fullmatch(r"error: .*mixer\.py, line 4: .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "number", [errno.ENAMETOOLONG, errno.ELOOP, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT]
)
def test_path_and_disk_errors_are_one_line(number, capsys):
    with pytest.raises(SystemExit) as ended, command_line.reporting():
        raise OSError(number, os.strerror(number), "where")
    assert ended.value.code == 2
    assert re.fullmatch(r"error: .*'where'.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 8.00 TiB for an array"),
        MemoryError(),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."),
        jax.errors.JaxRuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 8 bytes."),
    ],
    ids=str,
)
def test_out_of_memory_errors_are_one_line(error, capsys):
    """Errors from numpy, from an accelerator, and from XLA on a CPU."""
    with pytest.raises(SystemExit) as ended, command_line.reporting(), command_line.explained():
        raise error
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1 and "config.train.per_device_batch_size" in stderr


INTERRUPTED = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
where, sys.argv[1:] = sys.argv[1], ["--config=transformer_pp:debug"]
sys.meta_path.insert(0, Finder())
runpy.run_module("seqjax.main", run_name="__main__")
"""


@pytest.mark.parametrize("where", ["jax", "seqjax.mixers", "orbax"])
def test_an_interrupt_during_imports_is_one_line(where, tmp_path):
    """Interrupted while importing JAX, our modules, and a training dependency."""
    command = [sys.executable, "-c", INTERRUPTED, where]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stderr) == (130, "\nInterrupted.\n")
    assert not list(tmp_path.iterdir())


IN_CALLBACK = """
from seqjax.command_line import run_command

def main(argv):
    import jax
    raise ERROR("Exception raised in callback: Traceback:\\n  File\\nKeyboardInterrupt: \\n")

run_command(main, [])
"""


@pytest.mark.parametrize("error", [pytest.param("RuntimeError", marks=pytest.mark.slow), "jax.errors.JaxRuntimeError"])
def test_an_interrupt_in_a_compiler_callback_is_one_line(tmp_path, error):
    """MLIR turns the interrupt into its own error."""
    command = [sys.executable, "-c", IN_CALLBACK.replace("ERROR", error)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stderr) == (130, "\nInterrupted.\n")
