"""A mixer whose code ends the process has not passed the checks of judge."""

from unittest import mock

import pytest

from seqjax.errors import UserError
from seqjax.study.judge import soundness
from seqjax.study.judge.plan import Plan

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


@pytest.mark.parametrize("call", ["sys.exit(0)", "os._exit(0)"])
def test_a_mixer_that_ends_the_process_has_not_passed(call, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ENDING.format(call=call) + CONFIG)
    plan = mock.create_autospec(Plan, instance=True, model="mine", text=f"{path}:debug")
    with pytest.raises(UserError, match=r"status 0"):
        soundness.require_sound(plan)
