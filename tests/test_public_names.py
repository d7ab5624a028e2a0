"""`import seqjax`: what it offers, and that it costs nothing."""

import subprocess
import sys

import pytest

import seqjax
from seqjax import data

CHEAP = """
import sys
before = set(sys.modules)
import seqjax
heavy = {name.split(".")[0] for name in set(sys.modules) - before} & {"jax", "flax", "numpy", "absl", "orbax"}
assert not heavy, heavy
assert {"load", "Model", "Config", "mixers", "ops", "testing"} <= set(dir(seqjax))
assert not any(name.startswith("seqjax.") for name in sys.modules)
"""


def test_importing_is_cheap():
    done = subprocess.run([sys.executable, "-c", CHEAP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    for name in seqjax.__all__:
        assert getattr(seqjax, name) is not None
    assert callable(seqjax.load)
    assert seqjax.mixers.Mamba2.__name__ == "Mamba2"
    with pytest.raises(AttributeError, match="'lod'"):
        seqjax.lod  # noqa: B018 - the access is the test


def test_every_name_of_the_data_is_there():
    assert {*data.__all__} <= {*dir(data)}
    for name in data.__all__:
        assert callable(getattr(data, name))
    with pytest.raises(AttributeError, match="'open_corpora'"):
        data.open_corpora  # noqa: B018 - the access is the test
