"""Mixers in user files: lookup, reloading, source hashes and errors."""

import sys

import pytest

from seqjax import mixers
from seqjax.config import from_config_dict, presets, to_dict
from seqjax.errors import UserError
from seqjax.mixers import _registry
from tests import support

EXAMPLE = support.page_block("docs/add_a_mixer.md", "class GatedEma(")
CLASS = EXAMPLE[: EXAMPLE.index("def get_config")].replace('@mixers.register("gema")\n', "")
CONFIG = """\
from seqjax import presets

def get_config(arg=""):
    return presets.get_config(arg, name="mine", mixer={"name": "NAME", "expand": 1})
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Provide an empty current directory and an empty registry."""
    monkeypatch.setattr(_registry, "_registered", {})
    monkeypatch.setattr(_registry, "_by_file", set())
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    yield place
    sys.modules.pop("gema", None)


def read(flag, **settings):
    return from_config_dict(presets.read_config(flag, [(k.replace("__", "."), v) for k, v in settings.items()]))


def mixer_of(config):
    return to_dict(config)["model"]["mixer"]


def test_the_example_is_a_config_and_is_at_most_30_lines(here):
    assert len(EXAMPLE.splitlines()) <= 30
    (here / "gema.py").write_text(EXAMPLE)
    assert mixer_of(read("gema.py:debug")) == {"name": "gema", "expand": 2}
    assert mixers.load("gema").__name__ == "GatedEma"


@pytest.mark.parametrize("name", ["plain", "plain.py:GatedEma"])
def test_classes_load_from_config_and_current_directory(here, tmp_path, name):
    (tmp_path / "plain.py").write_text(CLASS)
    (tmp_path / "mine.py").write_text(CONFIG.replace("NAME", name))
    assert mixer_of(read("../mine.py:debug")) == {"name": name, "expand": 1}
    loaded = mixers.load(name)
    (here / "plain.py").write_text(CLASS)  # the same file
    assert mixer_of(read("transformer_pp:debug", model__mixer__name=name)) == {"name": name, "expand": 2}
    assert mixers.load(name) is loaded


def test_mixer_names_exclude_the_directory(tmp_path):
    (tmp_path / "plain.py").write_text(CLASS)
    for path in ("../plain.py", str(tmp_path / "plain.py")):
        config = read("transformer_pp:debug", model__mixer__name=f"{path}:GatedEma")
        assert mixer_of(config)["name"] == "plain.py:GatedEma"
        direct = presets.get_config("debug", name="x", mixer={"name": f"{path}:GatedEma"})
        assert from_config_dict(direct).model.mixer == config.model.mixer


def test_a_file_read_as_config_and_as_module_registers_once(here, monkeypatch):
    (here / "gema.py").write_text(EXAMPLE)
    config = read("gema.py:debug")
    cls = mixers.load("gema")
    monkeypatch.syspath_prepend(str(here))
    import gema  # pyright: ignore[reportMissingImports]

    assert gema.GatedEma is cls
    assert read("gema.py:debug").model.mixer == config.model.mixer
    assert read("transformer_pp:debug", model__mixer__name="gema.py:GatedEma").model.mixer.expand == 2
    assert mixers.load("gema.py:GatedEma") is mixers.load("gema") is cls


def test_an_edited_file_runs_again_with_the_next_config(here):
    (here / "plain.py").write_text(CLASS)
    read("transformer_pp:debug", model__mixer__name="plain")
    (here / "plain.py").write_text(CLASS.replace("expand: int = 2", "expand: int = 3"))
    assert mixers.settings_class("plain")(name="plain").expand == 2  # the model in use keeps its class
    assert read("transformer_pp:debug", model__mixer__name="plain").model.mixer.expand == 3


def test_hashes_cover_only_user_files(here):
    (here / "gema.py").write_text(EXAMPLE)
    read("gema.py:debug")
    support_file = "tests.mixers.layer_probe"
    hashes = mixers.source_hashes(["mamba2", "gema", support_file])
    assert set(hashes) == {"gema", support_file}
    assert hashes["gema"] == mixers.sources(["gema", "mamba2"])["gema"].sha256


def test_a_class_from_an_imported_file_has_a_name(here, monkeypatch):
    (here / "gema.py").write_text(CLASS + CLASS[CLASS.index("class GatedEma") :].replace("GatedEma", "Second"))
    monkeypatch.syspath_prepend(str(here))
    import gema  # pyright: ignore[reportMissingImports]

    assert mixers.name_of(gema.GatedEma) == "gema.py:GatedEma"
    assert mixers.load("gema.py:GatedEma") is gema.GatedEma


TWO = CLASS + "\n\nclass Second(GatedEma):\n    pass\n"


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("gema", "", r"gema\.py .*seqjax\.mixers\.base\.Mixer.*none"),
        ("gema", TWO, r"GatedEma, Second"),
        ("gema", CLASS.replace("def init_cache", "def cache"), r"GatedEma .*gema\.py .*init_cache "),
        ("gema", "def f(:\n", r"gema\.py, line 1: "),
        ("gema", "\nimport no_such_package\n", r"gema\.py, line 2: ModuleNotFoundError"),
        ("gema.py:Other", CLASS, r"'Other'.*GatedEma"),
        ("gema.py:jnp", CLASS, r"jnp .*gema\.py .*seqjax\.mixers\.base\.Mixer"),
        ("gema.py", CLASS, r"'gema\.py'.*FILE\.py:CLASS"),
        ("gema.py:", CLASS, r"'gema\.py:'.*FILE\.py:CLASS"),
        ("none.py:GatedEma", CLASS, r"none\.py"),
        ("gemma", CLASS, r"'gemma'.*gemma\.py"),
        ("../gema", CLASS, r"'\.\./gema'"),
    ],
)
def test_a_wrong_file_or_name_is_refused_in_one_line(here, name, text, match):
    (here / "gema.py").write_text(text)
    with pytest.raises(UserError, match=match) as error:
        read("transformer_pp:debug", model__mixer__name=name)
    assert "\n" not in str(error.value)


def test_names_of_shipped_mixers_are_refused(here):
    (here / "mamba2.py").write_text(EXAMPLE.replace('"gema"', '"mamba2"'))
    with pytest.raises(UserError, match=r"'mamba2'.*ships"):
        read("./mamba2.py:debug")
    (here / "mamba2.py").write_text(CLASS + CONFIG.replace("NAME", "mamba2"))
    with pytest.raises(UserError, match=r"mamba2\.py .*ships"):
        read("./mamba2.py:debug")


def test_two_different_files_with_one_name_are_refused(here, tmp_path):
    (tmp_path / "gema.py").write_text(EXAMPLE)
    (here / "gema.py").write_text(EXAMPLE + "# other\n")
    (tmp_path / "mine.py").write_text(CONFIG.replace("NAME", "gema"))
    with pytest.raises(UserError, match=r"gema.*two files"):
        read("../mine.py:debug")
    read("../gema.py:debug")
    with pytest.raises(UserError, match=r"'gema'.*two files"):
        read("gema.py:debug")
    (here / "gema.py").write_text(CLASS)
    with pytest.raises(UserError, match=r"gema.*two files"):
        read("transformer_pp:debug", model__mixer="({'name':'../gema.py:GatedEma'},{'name':'gema.py:GatedEma'})")


def test_a_missing_py_suffix_is_named(here):
    (here / "gema.py").write_text(EXAMPLE)
    with pytest.raises(UserError, match=r"--config=gema\.py"):
        presets.read_config("gema:debug")
