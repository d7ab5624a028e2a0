"""MLP widths that match a model's parameters to the reference's."""

import pytest

from seqjax.errors import UserError
from seqjax.study.judge import matching, plan

REFERENCE = "transformer_pp:{},model.mixer.qk_norm=True,model.mixer.conv=True"
CONFIG_FILE = """from seqjax import presets


def get_config(arg="debug"):
    config = presets.get_config(arg, name="mine", mixer={"name": "%s"}%s)
    %s
    return config
"""


def match(config, size, how=None):
    text = f"{config}:{size}"
    return matching.match(text, plan.read(text), plan.read(REFERENCE.format(size)), how=how)


@pytest.fixture
def write_config(tmp_path):
    def write(mixer="mamba2", settings="", then="", name="mine.py"):
        path = tmp_path / name
        path.write_text(CONFIG_FILE % (mixer, settings, then))
        return path

    return write


@pytest.mark.parametrize(("size", "grid", "within"), [("110m", 64, 0.01), ("demo", 16, 0.02)])
def test_matched_width_is_best_on_the_grid(write_config, size, grid, within):
    path = write_config()
    matched = match(path, size)
    assert matched.width % grid == 0
    configs = {d: plan.read(f"{path}:{size},model.mlp.dim={matched.width + d}") for d in (-grid, 0, grid)}
    differences = {d: abs(matching.parameters(config) - matched.reference) for d, config in configs.items()}
    assert differences[0] == min(differences.values()) and matched.parameters == matching.parameters(configs[0])
    assert abs(matched.parameters / matched.reference - 1) < within


def test_explicit_width_is_kept(write_config):
    assert match(write_config(), "debug") is not None
    for width in ("64", "2048"):  # 2,048 is also the size's default
        assert match(write_config(settings=f", settings={{'model.mlp.dim': {width}}}"), "110m") is None
    assert match(write_config(then="config.model.mlp.dim = 2048"), "110m") is None
    assert match(write_config(), "110m,model.mlp.dim=2048") is None
    assert match(write_config(), "debug", "none") is None


def test_shipped_config_is_matched_only_on_request():
    assert match("gated_deltanet", "110m") is None
    matched = match("gated_deltanet", "110m", "params")
    assert matched.width == 1536 and abs(matched.parameters / matched.reference - 1) < 0.01


def test_block_without_mlp_is_refused(write_config):
    assert match("mamba2", "110m") is None
    with pytest.raises(UserError, match=r"--match=params: .*mamba2 .*MLP"):
        match("mamba2", "110m", "params")
    with pytest.raises(UserError, match="--match=all"):
        match("mamba2", "110m", "all")


def test_block_ignoring_the_width_is_refused(monkeypatch):
    monkeypatch.setattr(matching, "parameters", lambda config: 7)
    with pytest.raises(UserError, match=r"gla .*model\.mlp\.dim"):
        match("gla", "debug", "params")
