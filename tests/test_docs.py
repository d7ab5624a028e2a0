"""The mixer in docs/add_a_mixer.md builds, is causal and decodes."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from seqjax.config import from_config_dict, presets
from seqjax.models import Model
from tests import support

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Build a model with the page's mixer and config, under a dotted name."""
    page = "docs/add_a_mixer.md"
    mixer, config = support.page_block(page, "class Ema("), support.page_block(page, 'name="ema"')
    package = tmp_path / "brought_along"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "ema.py").write_text(mixer)
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {}
    exec(config, namespace)
    settings = namespace["get_config"]("debug,model.mixer.name=brought_along.ema,train.seq_len=13")
    assert settings.name == "ema"
    assert settings.train == presets.get_config("debug,train.seq_len=13", name="x", mixer={"name": "mamba2"}).train
    yield Model(from_config_dict(settings).model, max_len=13)
    for name in [n for n in sys.modules if n.startswith("brought_along")]:
        del sys.modules[name]


def test_the_example_mixer_is_causal_and_decodes(model):
    weights = support.random_params(model)
    tokens = support.random_tokens((2, 13))
    want = np.asarray(jax.jit(model.logits)(weights, tokens))
    changed = np.asarray(jax.jit(model.logits)(weights, tokens.at[:, 6].add(1)))
    np.testing.assert_array_equal(changed[:, :6], want[:, :6])
    assert np.abs(changed[:, 6:] - want[:, 6:]).max() > 0
    logits, cache = jax.jit(model.prefill)(weights, tokens[:, :5], model.init_cache(2, 13))
    for t in range(5, 13):
        np.testing.assert_allclose(logits, want[:, t - 1], rtol=1e-4, atol=1e-4)
        logits, cache = jax.jit(model.step)(weights, tokens[:, t], np.int32(t), cache)


def test_links_have_targets():
    root = DOCS.parent
    for page in [root / "README.md", root / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
