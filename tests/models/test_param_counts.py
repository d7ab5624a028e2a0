"""Exact parameter counts of all architectures and ablations at the paper's sizes."""

import importlib

import pytest

from seqjax.config import from_config_dict
from seqjax.models import Model, flops

# FoX's Pro block
PRO = "model.mixer.kv_shift=True,model.mixer.qk_norm=True,model.mixer.output_gate=True"
# (config, argument) -> exact count here, and the rounded count of the public implementation
COUNTS = {
    ("transformer", "110m"): (111_204_864, 111.2e6),
    ("transformer_pp", "110m"): (109_529_856, 109.5e6),
    ("mamba1", "110m"): (115_096_320, 115.1e6),
    ("mamba2", "110m"): (114_944_448, 114.9e6),
    ("log_linear_mamba2", "110m"): (120_259_776, 120.3e6),
    ("mamba3", "110m"): (109_386_048, 109.4e6),
    ("mamba3", "110m,model.n_layers=24,model.mlp.kind=none"): (116_320_128, 116.3e6),
    ("rwkv5", "110m"): (116_720_640, 116.7e6),
    ("rwkv6", "110m"): (120_867_840, 120.9e6),
    ("based", "110m"): (121_112_064, 121.1e6),
    ("rwkv5", "110m,model.tie_embeddings=False"): (141_296_640, 141.3e6),
    ("rwkv6", "110m,model.tie_embeddings=False"): (145_443_840, 145.4e6),
    ("mamba2", "135m_100k"): (139_520_448, 139.5e6),
    ("fox", "110m"): (109_640_592, 109.6e6),
    ("fox", f"110m,{PRO},model.mlp.dim=1792"): (109_889_424, 109.9e6),
    ("path", "110m"): (110_258_064, 110.3e6),
    ("nsa", "110m"): (109_861_632, 109.9e6),
    ("moba", "110m"): (109_529_856, 109.5e6),
    ("gated_attention", "110m"): (109_531_392, 109.5e6),
    ("mla", "110m"): (109_827_840, 109.8e6),
    ("mla", "110m,model.mixer.gate=True,model.mlp.dim=1920"): (109_827_840, 109.8e6),
    ("kimi_linear", "110m"): (110_628_534, 110.6e6),
    ("kimi_k3", "110m,model.mixer[3].q_rank=None"): (110_621_622, 110.6e6),
    ("kimi_k3", "110m"): (110_180_406, 110.2e6),
    ("qwen3_next", "110m"): (110_988_120, 111.0e6),
    ("olmo_hybrid", "110m"): (109_702_188, 109.7e6),
    ("gated_deltanet_hybrid", "110m"): (109_697_964, 109.7e6),
    ("msa", "110m"): (111_892_224, 111.9e6),
    ("dsa", "110m"): (112_258_560, 112.3e6),
    ("transformer", "1b3"): (1_278_332_928, 1278e6),
    ("mamba1", "1b3"): (1_334_740_992, 1335e6),
    ("mamba2", "1b3"): (1_306_303_488, 1306e6),
    ("ablations.mamba1_one_decay", "110m"): (114_543_408, 114.5e6),
    ("ablations.mamba1_no_decay", "110m"): (114_506_496, 114.5e6),
    ("ablations.mamba1_no_decay_no_conv", "110m"): (114_322_176, 114.3e6),
    ("ablations.mamba2_one_decay", "110m"): (114_962_352, 115.0e6),
    ("ablations.mamba2_no_decay", "110m"): (114_943_872, 114.9e6),
    ("ablations.mamba2_no_decay_no_conv", "110m"): (114_728_832, 114.7e6),
    ("ablations.mamba2_no_norm", "110m"): (114_907_584, 114.9e6),
    ("ablations.position_none", "110m"): (109_529_856, 109.5e6),
    ("ablations.position_alibi", "110m"): (109_529_856, 109.5e6),
    ("ablations.position_absolute", "110m"): (111_102_720, 111.1e6),
    ("ablations.temperature", "110m"): (109_529_856, 109.5e6),
    ("ablations.const_k", "110m"): (121_326_336, 121.3e6),
    ("ablations.const_qk", "110m"): (133_122_816, 133.1e6),
}


def n_params(name, arg):
    config = from_config_dict(importlib.import_module(f"configs.{name}").get_config(arg))
    return flops.n_params(Model(config.model, max_len=config.train.seq_len))


@pytest.mark.parametrize(("name", "arg"), COUNTS)
def test_parameter_counts(name, arg):
    exact, printed = COUNTS[name, arg]
    assert n_params(name, arg) == exact
    assert abs(exact - printed) <= (1e6 if printed > 1e9 else 1e5) / 2
