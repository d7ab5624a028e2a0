"""Mixer checks before a judgement: their process's output and exit status."""

from unittest import mock

import pytest

from seqjax.errors import UserError
from seqjax.study.judge import soundness
from seqjax.study.judge.plan import Plan, make_plan

ENDING = """
import os, sys
from seqjax import mixers
from seqjax.mixers.base import RecurrentMixer

@mixers.register("ending")
class Ending(RecurrentMixer):
    def __init__(self, dim, *, rngs):
        {call}

    def init_cache(self, batch, max_len, dtype):
        return ()

    def step(self, x_BD, cache):
        return x_BD, cache
"""
CONFIG = """

def get_config(arg=""):
    from seqjax import presets
    return presets.get_config(arg, name="mine", mixer={"name": "ending"})
"""


def test_checks_are_printed_and_a_failure_raises(tmp_path, monkeypatch, capsys):
    plan = make_plan("transformer_pp:debug", out=tmp_path / "out", cache=tmp_path / "cache")
    child = "import sys; print(f'output passed of {sys.argv[1]}', flush=True)\n"
    child += "sys.stderr.write('a warning\\nMine fails 1 of 2 checks. step: differs'); sys.exit(1)"
    monkeypatch.setattr(soundness, "CHECK", child)
    with pytest.raises(UserError, match=r"check_mixer: Mine .*step: differs$"):
        soundness.require_sound(plan)
    assert f"  output passed of {plan.text}\n" in capsys.readouterr().out
    monkeypatch.setattr(soundness, "CHECK", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match=r"status -9$"):
        soundness.require_sound(plan)
    monkeypatch.setattr(soundness, "CHECK", "print('causality passed'); print('all checks passed')")
    soundness.require_sound(plan)


def test_check_failure_is_one_line_on_stderr(monkeypatch, capsys):
    def failing_check(cls, *, say, **options):
        say("output passed")
        raise AssertionError("Mine fails 2 of 3 checks.\nstep: a\nlong: b")

    monkeypatch.setattr(soundness.testing, "check_mixer", failing_check)
    with pytest.raises(SystemExit, match="1"):
        soundness.check("transformer_pp:debug")
    output = capsys.readouterr()
    assert output.out == "output passed\n"
    assert output.err.rpartition("\n")[2] == "Mine fails 2 of 3 checks. step: a long: b"


@pytest.mark.parametrize("call", ["sys.exit(0)", "os._exit(0)"])
def test_mixer_that_exits_the_process_fails(call, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ENDING.format(call=call) + CONFIG)
    plan = mock.create_autospec(Plan, instance=True, model="mine", text=f"{path}:debug")
    with pytest.raises(UserError, match=r"status 0"):
        soundness.require_sound(plan)
