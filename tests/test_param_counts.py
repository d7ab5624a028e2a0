"""Parameters of every architecture and ablation at the paper's sizes, to the last digit that is printed."""

import importlib

import pytest

from seqjax import flops
from seqjax.config import from_config_dict
from seqjax.model import Model

# (config, argument) -> parameters, counted in the public implementations of each architecture
COUNTS = {
    ("transformer", "110m"): 111.2e6,
    ("transformer_pp", "110m"): 109.5e6,
    ("mamba1", "110m"): 115.1e6,
    ("mamba2", "110m"): 114.9e6,
    ("rwkv5", "110m"): 116.7e6,
    ("rwkv6", "110m"): 120.9e6,
    ("based", "110m"): 121.1e6,
    ("rwkv5", "110m,model.tie_embeddings=False"): 141.3e6,
    ("rwkv6", "110m,model.tie_embeddings=False"): 145.4e6,
    ("mamba2", "135m_100k"): 139.5e6,
    ("transformer", "1b3"): 1278e6,
    ("mamba1", "1b3"): 1335e6,
    ("mamba2", "1b3"): 1306e6,
    ("ablations.mamba1_one_decay", "110m"): 114.5e6,
    ("ablations.mamba1_no_decay", "110m"): 114.5e6,
    ("ablations.mamba1_no_decay_no_conv", "110m"): 114.3e6,
    ("ablations.mamba2_one_decay", "110m"): 115.0e6,
    ("ablations.mamba2_no_decay", "110m"): 114.9e6,
    ("ablations.mamba2_no_decay_no_conv", "110m"): 114.7e6,
    ("ablations.mamba2_no_norm", "110m"): 114.9e6,
    ("ablations.position_none", "110m"): 109.5e6,
    ("ablations.position_alibi", "110m"): 109.5e6,
    ("ablations.position_absolute", "110m"): 111.1e6,
    ("ablations.temperature", "110m"): 109.5e6,
    ("ablations.const_k", "110m"): 121.3e6,
    ("ablations.const_qk", "110m"): 133.1e6,
}


def n_params(name, arg):
    config = from_config_dict(importlib.import_module(f"configs.{name}").get_config(arg))
    return flops.n_params(Model(config.model, max_len=config.train.seq_len))


@pytest.mark.parametrize(("name", "arg"), COUNTS)
def test_parameter_counts(name, arg):
    printed = COUNTS[name, arg]
    last_digit = 1e6 if printed > 1e9 else 1e5
    assert abs(n_params(name, arg) - printed) <= last_digit / 2
