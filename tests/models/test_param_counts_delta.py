"""Parameter counts of delta-rule mixers, GLA, mLSTM and RWKV-7 equal the public implementations'."""

import importlib

import pytest

from seqjax.config import from_config_dict
from seqjax.models import Model, flops

# millions, vocabulary 32,000; tied at 2k tokens, untied at 100k
COUNTS = {
    ("deltanet", "110m"): 109.7,
    ("deltanet", "135m_100k"): 134.3,
    ("gated_deltanet", "110m"): 123.9,
    ("gated_deltanet", "135m_100k"): 148.5,
    ("gated_deltaproduct", "110m"): 109.7,  # Transformer++ has 109.5
    ("gated_deltaproduct", "135m_100k"): 134.3,
    ("gla", "110m"): 109.8,
    ("mlstm", "110m"): 109.6,
    ("kda", "110m"): 114.4,
    ("kda", "110m,model.mixer.heads=12"): 112.1,
    ("kda", "110m,model.mixer.heads=12,model.mixer.channel_gates=True,model.mlp.dim=1536"): 112.0,
    ("comba", "110m"): 109.8,
    ("precond_gated_deltanet", "110m"): 109.9,
    ("precond_kda", "110m"): 112.4,
    ("mesa_net", "110m"): 109.8,
    ("ttt_linear", "110m"): 110.4,
    ("parallax", "110m"): 109.5,
    ("wall", "110m"): 109.5,
    ("rwkv7", "110m"): 114.9,
    ("rwkv7", "135m_100k"): 139.5,
}

# The first layer's v-LoRA (rank 32) and its bias: stacked layers share one structure, the official code omits them.
UNUSED = {"rwkv7": 2 * 768 * 32 + 768}

NOTHING = {"token_shift": False, "value_residual": False, "gate": False, "head_norm": False}
SHIFT_AND_GATE = NOTHING | {"token_shift": True, "gate": True}
SHELLS = [("full", {}, 137.1), ("full", SHIFT_AND_GATE, 136.5), ("full", NOTHING, 134.1)]
OTHERS = [(core, {}, 137.1) for core in ("window", "top1_exact", "top1_best_key", "top1_approx")]


@pytest.mark.parametrize(("core", "flags", "millions"), [*SHELLS, *OTHERS])
def test_rwkv7_shell(core, flags, millions):
    config = importlib.import_module("configs.rwkv7_shell").get_config("135m_100k")
    config.model.mixer.update({"core": core, **flags})
    model = Model(from_config_dict(config).model, max_len=128)
    unused = UNUSED["rwkv7"] if config.model.mixer.value_residual else 0
    assert round((flops.n_params(model) - unused) / 1e6, 1) == millions


@pytest.mark.parametrize(("name", "size"), COUNTS)
def test_parameter_count(name, size):
    config = from_config_dict(importlib.import_module(f"configs.{name}").get_config(size))
    count = flops.n_params(Model(config.model, max_len=8)) - UNUSED.get(name, 0)
    assert round(count / 1e6, 1) == COUNTS[name, size]
