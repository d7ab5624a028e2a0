"""Config files by name and path from any directory, and configs based on another config."""

import ast

import pytest

from seqjax.config import from_config_dict, presets, to_dict
from seqjax.errors import UserError
from tests.support import ROOT

MINE = """
from seqjax import presets

def get_config(arg=""):
    return presets.get_config(arg, name="mine", base="ablations/window", settings={"optim.lr": 1.0})
"""


def read(flag, *overrides):
    return from_config_dict(presets.read_config(flag, overrides))


@pytest.mark.parametrize("name", ["top1_chunk", "configs/top1_chunk.py", str(ROOT / "configs" / "top1_chunk.py")])
def test_a_config_is_found_from_any_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert presets.find(name) == ROOT / "configs" / "top1_chunk.py"
    config = read(f"{name}:debug,model.mixer.selection=approx")
    assert (config.name, config.size, config.model.mixer.selection) == ("top1_chunk", "debug", "approx")


@pytest.mark.parametrize("name", ["ablations/window", "ablations.window", "configs/ablations/window.py"])
def test_a_config_in_a_folder_is_selected_by_name(name):
    assert read(f"{name}:64,debug").model.mixer.window == 64


def test_a_user_file_precedes_a_shipped_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "top1_chunk.py").write_text(MINE)
    assert read("configs/top1_chunk.py:debug").name == "mine"
    assert read("top1_chunk:debug").name == "top1_chunk"


def test_no_argument_selects_demo():
    assert to_dict(read("top1_chunk")) == to_dict(read("top1_chunk:demo,limited"))


@pytest.mark.parametrize("name", ["top1_chnk", "configs/top1_chnk.py", "README.md", "top1_chunk.txt", "__init__", ""])
def test_a_missing_config_is_refused(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=r"config.*Known: based, .*top1_chunk"):
        presets.find(name)


def test_a_study_as_config_is_refused():
    with pytest.raises(UserError, match=r"studies/figure3d\.py .*get_config"):
        read("studies/figure3d:debug")


def test_shipped_names_match_the_files():
    assert presets.names() == sorted(p.stem for p in (ROOT / "configs").glob("*.py") if p.stem != "__init__")
    assert "figure1b" in presets.names("studies")
    assert not any(name.startswith("_") for name in presets.names("studies")), "what studies share is no study"


def test_an_unknown_choice_lists_the_names():
    assert presets.pick({"demo": 1, "small": 2}, "small", kind="size") == 2
    with pytest.raises(UserError, match=r"'smal' .*size.*'small'.*demo, small"):
        presets.pick({"demo": 1, "small": 2}, "smal", kind="size")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.py")), ids=lambda p: p.stem)
def test_config_files_import_only_presets(path):
    """So a config file runs in any directory. Its header names the command and the results page."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert all(ast.unparse(node) == "from seqjax import presets" for node in imports)
    header = ast.get_docstring(tree) or ""
    if (
        not path.stem.startswith("_") and "seqjax " in header
    ):  # tests/test_configs.py checks which configs have a header
        name = path.relative_to(ROOT / "configs").with_suffix("").as_posix().removeprefix("studies/")
        assert f"={name}" in header
        assert "lab/results/" in header


# ---------------------------------------------------------------------------------------------------------- flags
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "7", 7),
        ("optim.lr", "1", 1.0),
        ("optim.clip_norm", "None", None),
        ("optim.clip_norm", "0.5", 0.5),
        ("eval.batch_size", "16", 16),
        ("log.tensorboard", "false", False),
        ("data.train_domains", "('prose',)", ("prose",)),
        ("data.path", "[a", "[a"),
        ("name", "3", "3"),
        ("model.remat", "full", "full"),
    ],
)
def test_flags_set_values_with_their_types(key, text, value):
    config = read("top1_chunk:debug", (key, text))
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value
    assert type(config) is type(value)


@pytest.mark.parametrize(
    ("text", "corpus"),
    [("", "builtin"), ("data.path=data/x", "blocks"), ("data.tfds=('lm1b',)", "tfds")],
)
def test_data_path_implies_prepared_blocks(text, corpus):
    config = from_config_dict(presets.read_config(",".join(["transformer_pp:demo", *filter(None, [text])])))
    assert config.data.corpus == corpus


def test_flags_set_mixer_settings():
    assert read("based:debug", ("model.mixer[2].window", "9")).model.mixer[2].window == 9
    assert read("transformer_pp:debug", ("model.mixer.window", "9")).model.mixer.window == 9
    config = read("top1_chunk:debug", ("model.mixer.name", "mamba1"), ("model.mixer.state", "4"))
    assert (config.model.mixer.name, config.model.mixer.state) == ("mamba1", 4)
    with pytest.raises(UserError, match=r"model\.mixer .*5"):
        read("based:debug", ("model.mixer.window", "9"))


def test_mixer_flags_apply_to_files_that_ignore_their_argument(tmp_path):
    path, body = (
        tmp_path / "fixed.py",
        "    return presets.get_config('debug', name='fixed', mixer={'name': 'transformer_pp'})",
    )
    for head in ("def get_config(arg=''):", "def get_config():"):
        path.write_text(f"from seqjax import presets\n{head}\n{body}\n")
        config = read(str(path), ("model.mixer.chunk_size", "4"), ("model.mixer.name", "top1_chunk"))
        mixer = config.model.mixer
        assert (config.size, mixer.name, mixer.heads, mixer.chunk_size) == ("debug", "top1_chunk", 2, 4)
    with pytest.raises(UserError, match=r"get_config.*argument.*:110m"):
        read(f"{path}:110m")


# ---------------------------------------------------------------------------------------- configs with a base
def test_the_command_line_overrides_the_file_and_the_file_its_base(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    config = read(f"{path}:110m,mixed,train.seed=4")
    assert (config.name, config.size, config.data.regime, config.train.seed) == ("mine", "110m", "mixed", 4)
    assert (config.model.mixer.window, config.optim.lr, config.model.dim) == (256, 1.0, 768)
    config = read(f"{path}:debug,optim.lr=2,model.mixer.window=None")
    assert (config.model.mixer.window, config.optim.lr, config.size) == (None, 2.0, "debug")


def test_a_size_sets_default_heads_and_rope_base():
    written = {"name": "transformer_pp", "heads": 8}
    first, second, third = from_config_dict(
        presets.get_config(
            "135m_100k,model.n_layers=3",
            name="x",
            mixer=(written, {"name": "transformer_pp", "rope_base": 5.0}, {"name": "mamba2"}),
        )
    ).model.mixer
    assert (first.heads, first.rope_base) == (8, 1e6)
    assert (second.heads, second.rope_base) == (12, 5.0)
    assert third.head_dim == 64
    assert written == {"name": "transformer_pp", "heads": 8}, "what a file wrote stays as it is"


def test_errors_name_a_typo_in_a_config_file():
    with pytest.raises(UserError, match=r"model\.nrom=layernorm: .*'nrom'.*'norm'"):
        presets.get_config("debug", name="x", mixer={"name": "mamba2"}, settings={"model.nrom": "layernorm"})
    with pytest.raises(UserError, match=r"config\.model\.mixer\.stat .*'state'"):
        from_config_dict(presets.get_config("debug", name="x", mixer={"name": "mamba2", "stat": 4}))
    with pytest.raises(TypeError, match="mixer"):
        presets.get_config("debug", name="x")
