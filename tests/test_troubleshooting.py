"""docs/troubleshooting.md: each of the ten mistakes is made here, and the page prints what it says, word by word."""

import json
import re
import shlex

import pytest

from seqjax.command_line import run_command
from seqjax.commands import cli
from seqjax.config import from_config_dict, presets
from seqjax.training import workdir as workdirs
from seqjax.training.lock import locked
from tests import support

PAGE = support.ROOT / "docs" / "troubleshooting.md"
ROWS = re.findall(r"^\| (\d+) \| [^`]*: `([^`]+)` \| `` (.+) `` \|$", PAGE.read_text(), re.M)
TRITON, BUSY = "7", "9"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with `runs/first`, where a demo was begun; no interpreter for Triton."""
    workdirs.save_config(tmp_path / "runs" / "first", from_config_dict(presets.read_config("top1_chunk")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path


def said(command: str, capsys) -> str:
    """What a command that ends with status 2 prints at the end, with the page's process, host and time."""
    with pytest.raises(SystemExit) as ended:
        cli.run(shlex.split(command)[1:])
    assert ended.value.code == 2
    text = capsys.readouterr().err.splitlines()[-1]
    holder = "process 4242 on laptop, since 2026-01-31T12:00:00+00:00. "
    return re.sub(r"process \d+ on \S+, since \S+\. ", holder, text)


def test_there_are_ten():
    assert [int(number) for number, *_ in ROWS] == list(range(1, 11))


@pytest.mark.parametrize(("number", "command", "message"), ROWS, ids=[row[0] for row in ROWS])
def test_the_page_prints_what_the_mistake_says(number, command, message, here, capsys):
    if number == TRITON:  # tracing the step is enough; eight devices split a batch of eight
        command += " --config.train.batch_size=8 --dry_run"
    if number == BUSY:
        with locked(here / "runs" / "first"):
            assert said(command, capsys) == message
    else:
        assert said(command, capsys) == message
    assert json.loads((here / "runs" / "first" / "config.json").read_text())["train"]["steps"] == 300


def test_no_memory_is_an_error_for_users(capsys):
    import jax.numpy as jnp

    with pytest.raises(SystemExit) as ended:
        run_command(lambda argv: jnp.zeros((1 << 45,)), [])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: The device is out of memory: RESOURCE_EXHAUSTED: Out of memory")
    assert "config.train.per_device_batch_size" in message
