"""The MLP width that matches the parameters of a mixer's model to the reference's."""

import pytest

from seqjax.errors import UserError
from seqjax.study.judge import matching, plan

REFERENCE = "transformer_pp:{},model.mixer.qk_norm=True,model.mixer.conv=True"
MINE = """from seqjax import presets


def get_config(arg="debug"):
    config = presets.get_config(arg, name="mine", mixer={"name": "%s"}%s)
    %s
    return config
"""


def match(config, size, how=None):
    text = f"{config}:{size}"
    return matching.match(text, plan.read(text), plan.read(REFERENCE.format(size)), how=how)


@pytest.fixture
def mine(tmp_path):
    def write(mixer="mamba2", settings="", then="", name="mine.py"):
        path = tmp_path / name
        path.write_text(MINE % (mixer, settings, then))
        return path

    return write


@pytest.mark.parametrize(("size", "grid", "within"), [("110m", 64, 0.01), ("demo", 16, 0.02)])
def test_matched_width_is_best_on_the_grid(mine, size, grid, within):
    path = mine()
    found = match(path, size)
    assert found.width % grid == 0
    made = {d: plan.read(f"{path}:{size},model.mlp.dim={found.width + d}") for d in (-grid, 0, grid)}
    off = {d: abs(matching.parameters(config) - found.reference) for d, config in made.items()}
    assert off[0] == min(off.values()) and found.parameters == matching.parameters(made[0])
    assert abs(found.parameters / found.reference - 1) < within


def test_explicit_width_is_kept(mine):
    assert match(mine(), "debug") is not None
    for width in ("64", "2048"):  # 2,048 is also the width of the size
        assert match(mine(settings=f", settings={{'model.mlp.dim': {width}}}"), "110m") is None
    assert match(mine(then="config.model.mlp.dim = 2048"), "110m") is None
    assert match(mine(), "110m,model.mlp.dim=2048") is None
    assert match(mine(), "debug", "none") is None


def test_shipped_config_is_matched_only_on_request():
    assert match("gated_deltanet", "110m") is None
    found = match("gated_deltanet", "110m", "params")
    assert found.width == 1536 and abs(found.parameters / found.reference - 1) < 0.01


def test_block_without_mlp_is_refused(mine):
    assert match("mamba2", "110m") is None
    with pytest.raises(UserError, match="--match=params: the block of mamba2 has no MLP"):
        match("mamba2", "110m", "params")
    with pytest.raises(UserError, match="--match=all"):
        match("mamba2", "110m", "all")


def test_block_ignoring_the_width_is_refused(monkeypatch):
    monkeypatch.setattr(matching, "parameters", lambda config: 7)
    with pytest.raises(UserError, match=r"the block of gla ignores model\.mlp\.dim"):
        match("gla", "debug", "params")
