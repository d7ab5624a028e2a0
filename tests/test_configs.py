"""Config files at every size and regime, the paper's values, and configs as JSON."""

import ast
import dataclasses
import importlib
import itertools
import json
import re

import pytest
from ml_collections import ConfigDict

from seqjax.config import differences, from_config_dict, to_dict
from seqjax.config.presets import REGIMES, SIZES
from seqjax.errors import UserError
from seqjax.models import Model, flops
from tests import support
from tests.models.test_settings import MIXERS
from tests.support import ROOT

NAMES = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if p.stem != "__init__")
ABLATIONS = sorted(p.stem for p in (ROOT / "configs" / "ablations").glob("*.py") if p.stem != "__init__")


def get(name, arg=""):
    return importlib.import_module(f"configs.{name}").get_config(arg)


def load(name, arg=""):
    return from_config_dict(get(name, arg))


@pytest.mark.parametrize(
    ("name", "size"),
    support.slow_unless(lambda _, size: size in ("110m", "1b3"), itertools.product(NAMES, SIZES)),
)
def test_every_config_builds(name, size):
    """Uses shapes only, so 1.3B models build in a second. A regime changes only the data."""
    plain = load(name, size)
    for regime in REGIMES:
        config = load(name, f"{size},{regime}")
        assert (config.name, config.size, config.data.regime) == (name, size, regime)
        assert (config.model, config.train.seq_len) == (plain.model, plain.train.seq_len)
    model = Model(config.model, max_len=config.train.seq_len)
    assert flops.n_params(model) > 0
    assert flops.flops_per_token(model, config.train.seq_len) > 2 * flops.n_params(model)


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_builds_and_changes_few_settings(name):
    """The contract tests cover the settings; this checks the name and which settings change."""
    config = load(f"ablations.{name}", "110m,mixed")
    assert (config.name, config.size, config.data.regime) == (name, "110m", "mixed")
    bases = {"mamba1": "mamba1", "mamba2": "mamba2", "hybrid": "gated_deltanet_hybrid"}
    base = bases.get(name.split("_")[0], "transformer_pp")
    changed = differences(to_dict(load(base, "110m,mixed")), to_dict(config))
    assert 2 <= len(changed) <= 3, changed
    assert all(
        line.startswith(("name:", "model.mixer", "model.learned_positions:", "eval.entropy_tokens:"))
        for line in changed
    )


def header_of(name):
    return ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text())) or ""


def test_configs_of_tested_mixers_have_a_header():
    """New configs need none."""
    for name in NAMES:
        if {mixer.name for mixer in load(name).model.mixers} & set(MIXERS):
            assert f"seqjax train --config={name}" in header_of(name), name


@pytest.mark.parametrize("name", [*NAMES, *(f"ablations/{n}" for n in ABLATIONS)])
def test_headers_name_paper_command_and_results(name):
    """Headers state no times and losses, which only lab/results has."""
    header = header_of(name)
    if "seqjax train" not in header:
        return
    assert f"    seqjax train --config={name}\n" in header
    assert "arXiv" in header
    pages = re.findall(r"lab/results/\w+(?:\.md)?", header)
    assert pages
    assert all((ROOT / page).exists() for page in pages)
    assert not re.search(r"\b(minutes|seconds|nats|tokens/s)\b", header)


@pytest.mark.parametrize(
    ("arg", "window", "size"),
    [
        ("", 256, "demo"),
        ("64", 64, "demo"),
        (" full ,debug", None, "debug"),
        ("110m,mixed", 256, "110m"),
        ("9,110m", 9, "110m"),
    ],
)
def test_the_window_is_a_config_argument(arg, window, size):
    config = load("ablations.window", arg)
    assert (config.model.mixer.window, config.size) == (window, size)


def test_a_window_that_is_not_a_number_is_refused():
    with pytest.raises(UserError, match=r"'wide'.*size"):
        load("ablations.window", "wide,110m")


def test_the_default_argument_is_demo():
    for name in NAMES:
        assert to_dict(load(name)) == to_dict(load(name, "demo,limited"))
        assert load(name).data.corpus == "builtin"


# arXiv 2505.18522, Appendix A: settings by size
PAPER = {
    "110m": {
        "dim": 768, "n_layers": 12, "heads": 12, "lr": 2e-4, "warmup": 2500, "batch": 256, "seq": 2048, "base": 1e4,
    },
    "1b3": {
        "dim": 2048, "n_layers": 24, "heads": 16, "lr": 5e-5, "warmup": 5000, "batch": 128, "seq": 2048, "base": 1e4,
    },
    "135m_100k": {
        "dim": 768, "n_layers": 12, "heads": 12, "lr": 2e-4, "warmup": 2500, "batch": 8, "seq": 102_400, "base": 1e6,
    },
}  # fmt: skip


@pytest.mark.parametrize("size", PAPER)
@pytest.mark.parametrize("name", ["transformer_pp", "top1_chunk", "top1_element"])
def test_paper_settings(name, size):
    config = load(name, size)
    model, mixer = config.model, config.model.mixer
    assert {
        "dim": model.dim, "n_layers": model.n_layers, "heads": mixer.heads, "lr": config.optim.lr,
        "warmup": config.optim.warmup_steps, "batch": config.train.batch_size, "seq": config.train.seq_len,
        "base": mixer.rope_base,
    } == PAPER[size]  # fmt: skip
    assert (config.optim.b1, config.optim.b2, config.optim.weight_decay) == (0.9, 0.95, 0.0)
    # not in the paper; from seqjax/config/presets.py
    assert (config.optim.clip_norm, config.optim.eps, config.optim.final_lr) == (1.0, 1e-8, 0.0)
    per_step = config.train.batch_size * config.train.seq_len
    assert 100e9 - per_step < config.train.steps * per_step <= 100e9
    assert (model.vocab_size, config.data.tokenizer, model.norm, model.mlp.kind) == (
        32_000,
        "mixtral",
        "rmsnorm",
        "geglu",
    )
    assert mixer.qk_norm == name.startswith("top1")
    assert not mixer.bias
    assert not model.mlp.bias
    if name == "top1_chunk":
        assert (mixer.chunk_size, mixer.selection) == (128, "exact")


@pytest.mark.parametrize("name", NAMES)
def test_the_residual_dtype_follows_the_public_code(name):
    wide = name in ("based", "log_linear_mamba2", "mamba1", "mamba2", "mamba3")
    for size in SIZES:
        assert load(name, size).model.residual_dtype == ("float32" if wide else "compute")


# d = width, F = MLP width; per layer 4 d^2 for q, k, v, out, 3 d F for the MLP and 2 d for the norms; then the
# embedding, the final norm and, untied, the head. Top-1 adds two gains of the head width per layer.
COUNTS = {
    ("transformer_pp", "110m"): 109_529_856,
    ("top1_chunk", "110m"): 109_529_856 + 12 * 2 * 64,
    ("top1_element", "110m"): 109_529_856 + 12 * 2 * 64,
    ("transformer_pp", "1b3"): 1_279_887_360,
    ("transformer_pp", "135m_100k"): 134_105_856,
}
PRINTED = {"110m": 109.5e6, "1b3": 1.280e9, "135m_100k": 134.1e6}


@pytest.mark.parametrize(("name", "size"), COUNTS)
def test_parameter_counts(name, size):
    config = load(name, size).model
    d, f, layers = config.dim, config.mlp.dim, config.n_layers
    by_hand = layers * (4 * d * d + 3 * d * f + 2 * d) + d + 32_000 * d * (1 if config.tie_embeddings else 2)
    if name.startswith("top1"):
        by_hand += layers * 2 * 64
    assert flops.n_params(Model(config, max_len=2048)) == by_hand == COUNTS[name, size]
    assert by_hand == pytest.approx(PRINTED[size], rel=5e-4)


# --------------------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arg", ["debug", "110m,mixed,data.train_domains=('c4',),data.weights=(0.1,)"])
def test_configs_round_trip_through_json(name, arg):
    config = load(name, arg)
    text = json.dumps(to_dict(config))
    assert from_config_dict(json.loads(text)) == config
    assert from_config_dict(ConfigDict(json.loads(text))) == config
    assert hash(config) == hash(from_config_dict(json.loads(text)))


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("top1_chunk").train.steps = 3


def test_differences_name_the_keys():
    old = to_dict(load("top1_chunk", "debug"))
    new = to_dict(load("top1_chunk", "debug,train.seed=1,model.mixer.selection=approx"))
    assert differences(old, new) == ["model.mixer.selection: 'exact' -> 'approx'", "train.seed: 0 -> 1"]
    assert differences(old, old) == []
    assert differences({"a": 1}, {}) == ["a: 1 -> None"]
