"""What is used of JAX that JAX does not export: it is there, and a release without it is an error that says so."""

import operator
import subprocess
import sys

import jax
import pytest

from seqjax.distributed import jax_private, membership
from seqjax.distributed.jax_private import CLIENT, FIND, SERVICE, STATE, STATE_HAS
from seqjax.distributed.place import Place, find_place
from seqjax.errors import UserError
from tests import support

USED = [FIND, SERVICE, CLIENT, STATE, *((STATE[0], f"{STATE[1]}.{name}") for name in STATE_HAS)]


class Without:
    """An object that lacks an attribute."""

    def __init__(self, whole, name):
        self._whole, self._name = whole, name

    def __getattr__(self, name):
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._whole, name)


@pytest.fixture
def without(monkeypatch):
    """`without(module, name)`: JAX no longer has that."""

    def remove(module, name):
        *owner, last = name.split(".")
        found = jax_private._private(module, owner[0]) if owner else None
        if found is None:
            monkeypatch.delattr(f"{module}.{last}")
        else:
            monkeypatch.setattr(f"{module}.{owner[0]}", Without(found, last))

    return remove


def test_the_installed_jax_has_it():
    jax_private.require()


@pytest.mark.parametrize(("module", "name"), USED, ids=operator.itemgetter(1))
def test_a_release_without_it_is_refused_before_anything_waits(without, monkeypatch, module, name):
    def never(*args):
        raise AssertionError("a hub was started")

    monkeypatch.setattr(membership, "_start_hub", never)
    without(module, name)
    with pytest.raises(UserError) as caught:
        membership.join(Place("h0", 1, 2, 0))
    text = str(caught.value)
    assert text.startswith(f"--distributed: jax {jax.__version__} has no {module}.{name}")
    assert "Install a release that seqjax was tried on, 0.10.2 or 0.12.0.1" in text
    assert "pip install 'jax[cuda13]==0.12.0.1'" in text


def test_a_module_that_is_gone_is_the_same_error():
    with pytest.raises(UserError, match=r"has no jax\._src\.no_such_module\.client, by which"):
        jax_private._private("jax._src.no_such_module", "client")


def test_what_recognises_a_cluster_is_needed_only_without_the_flags(without):
    without(*FIND)
    with pytest.raises(UserError, match=r"has no jax\._src\.clusters\.ClusterEnv\.auto_detect"):
        find_place({}, address="a:1", count=2)
    assert find_place({"JAX_LOCAL_DEVICE_IDS": "0"}, address="a:1", count=2, index=1) == Place("a", 1, 2, 1, (0,))


def test_it_is_all_in_one_place():
    files = [path for path in (support.ROOT / "seqjax").rglob("*.py") if "jax._src" in path.read_text(encoding="utf-8")]
    assert [path.name for path in files] == ["jax_private.py"]


def test_the_hub_imports_jax_only_when_all_have_come():
    program = "import sys, seqjax.distributed.hub; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
