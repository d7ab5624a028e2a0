"""The checks before a judgement: what the process that runs them says, and how it ends."""

import pytest

from seqjax.errors import UserError
from seqjax.study.judge import soundness
from seqjax.study.judge.plan import make_plan


def test_each_check_is_shown_and_the_failure_is_the_error(tmp_path, monkeypatch, capsys):
    plan = make_plan("transformer_pp:debug", out=tmp_path / "out", cache=tmp_path / "cache")
    child = "import sys; print(f'output passed of {sys.argv[1]}', flush=True)\n"
    child += "sys.stderr.write('a warning\\nMine fails 1 of 2 checks. step: differs'); sys.exit(1)"
    monkeypatch.setattr(soundness, "CHECK", child)
    with pytest.raises(UserError, match=r"check_mixer: Mine fails 1 of 2 checks\. step: differs$"):
        soundness.require_sound(plan)
    assert f"  output passed of {plan.text}\n" in capsys.readouterr().out
    monkeypatch.setattr(soundness, "CHECK", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match=r"status -9$"):
        soundness.require_sound(plan)
    monkeypatch.setattr(soundness, "CHECK", "print('causality passed')")
    soundness.require_sound(plan)


def test_the_checks_of_a_config_end_with_one_line(monkeypatch, capsys):
    def checked(cls, *, say, **options):
        say("output passed")
        raise AssertionError("Mine fails 2 of 3 checks.\nstep: a\nlong: b")

    monkeypatch.setattr(soundness.testing, "check_mixer", checked)
    with pytest.raises(SystemExit, match="1"):
        soundness.check("transformer_pp:debug")
    said = capsys.readouterr()
    assert said.out == "output passed\n"
    assert said.err.rpartition("\n")[2] == "Mine fails 2 of 3 checks. step: a long: b"
