"""What a run meets outside its settings: a shell without stderr, no device, a checkpoint that cannot be."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from seqjax import command_line, files
from seqjax.commands import cli, generate
from seqjax.config import from_config_dict, presets, to_dict
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.terminal import StatusLine
from seqjax.training import lock, loop
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.mirrors import Mirror

CONFIG = from_config_dict(presets.get_config("debug", name="transformer_pp", mixer={"name": "transformer_pp"}))
CONFIG_DICT = to_dict(CONFIG)


def test_a_status_line_without_a_reader_goes_on():
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb")) as stream:
        line = StatusLine(stream=stream, log_seconds=0.0)
        for text in ("step 1", "step 2"):
            line.show(text)
            line.say(text)


def test_a_command_runs_without_stderr():
    code = (
        "import os; from seqjax.command_line import run_command; run_command(lambda _: print(os.fstat(2).st_rdev), [])"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0
    assert int(done.stdout) == Path(os.devnull).stat().st_rdev


def test_a_file_that_could_not_be_written_leaves_nothing(tmp_path):
    (tmp_path / "x").write_text("before")
    with pytest.raises(OSError, match="full"), files.replacing(tmp_path / "x") as file:
        file.write(b"after")
        raise OSError("full")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "before"


def test_a_command_runs_without_stdout():
    code = (
        "import sys; from seqjax import command_line; command_line.run_command(lambda _: sys.stdout.write('text'), [])"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_in_a_directory_that_was_deleted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(SystemExit) as ended:
        cli.run(["evaluate", "--workdir=run"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "deleted" in line


def test_a_platform_that_is_not_there(monkeypatch):
    def devices() -> Any:
        raise AssertionError

    with pytest.raises(AssertionError), command_line.explained():  # JAX has started: another error
        assert jax.devices() == 0
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(UserError, match=r"JAX_PLATFORMS=cuda .* Unset it"), command_line.explained():
        jax.devices()


@pytest.mark.parametrize("setting", ["mixer.implementation", "loss_implementation"])
def test_an_implementation_that_cannot_run_is_named_by_its_setting(setting):
    config = presets.get_config("debug", name="top1_chunk", mixer={"name": "top1_chunk", "implementation": None})
    with config.unlocked():
        config.update_from_flattened_dict({f"model.{setting}": "nowhere"})
    model = Model(from_config_dict(config).model, max_len=128)
    tokens = jax.ShapeDtypeStruct((1, 129), "int32")
    with pytest.raises(UserError, match=rf"Give another config\.model\.{setting};"), command_line.explained():
        jax.eval_shape(model.loss, model.shapes, tokens)


def test_training_without_compilation(tmp_path):
    with jax.disable_jit(), pytest.raises(UserError, match="JAX_DISABLE_JIT"):
        loop.train(CONFIG, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_steps_than_can_be_counted():
    with pytest.raises(UserError, match=r"train\.steps .* 2147483648,"):
        from_config_dict(CONFIG_DICT | {"train": CONFIG_DICT["train"] | {"steps": 2**63}})


@pytest.mark.parametrize("step", [21, 10**20])
def test_a_checkpoint_beyond_the_end(tmp_path, monkeypatch, step: int):
    nothing = (None,) * (len(loop.Setup._fields) - 1)
    setup, checkpoints = tuple.__new__(loop.Setup, (CONFIG, *nothing)), object.__new__(Checkpoints)
    monkeypatch.setattr(Checkpoints, "latest", step)
    monkeypatch.setattr(Checkpoints, "params_only", False)
    with pytest.raises(UserError, match=rf"checkpoints/{step} .*config\.train\.steps=20"):
        loop._restored(setup, checkpoints, Mirror(tmp_path))


def test_a_lock_from_the_future(tmp_path):
    holder = lock.Holder("elsewhere", "space", 1, "started", "since", "token")
    (tmp_path / lock.FILE).write_bytes(lock._content(holder))
    later = time.time() + 1e6
    os.utime(tmp_path / lock.FILE, (later, later))
    for wait in (False, True):  # which would wait until then
        with (
            pytest.raises(UserError, match=r"run\.lock .* \d{6,} s .*delete"),
            lock.locked(tmp_path, wait=wait),
        ):
            pass


def test_a_path_that_the_locale_does_not_know():
    with pytest.raises(UserError, match=r"r\\udcc3': .*Set PYTHONUTF8=1"):
        Mirror(Path("r\udcc3"))


@pytest.mark.parametrize("argument", ["--prompt=\udcff", "--stop=\udcff", f"--max_new_tokens={10**12}"])
def test_arguments_of_generate(tmp_path, argument: str):
    with pytest.raises(UserError, match=r"UTF-8|2147483648"):
        generate.main([f"--workdir={tmp_path}", argument])
