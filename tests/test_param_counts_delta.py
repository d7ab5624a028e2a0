"""Parameter counts of the delta-rule family, as the public implementations have them."""

import importlib

import pytest

from seqjax import flops
from seqjax.config import from_config_dict
from seqjax.model import Model

# millions, vocabulary 32,000; tied at 2k tokens, untied at 100k
COUNTS = {
    ("deltanet", "110m"): 109.7,
    ("deltanet", "135m_100k"): 134.3,
    ("gated_deltanet", "110m"): 123.9,
    ("gated_deltanet", "135m_100k"): 148.5,
    ("rwkv7", "110m"): 114.9,
    ("rwkv7", "135m_100k"): 139.5,
}

# The first layer's v-LoRA of rank 32 and its bias: stacked layers have one structure, the official code leaves it out.
UNUSED = {"rwkv7": 2 * 768 * 32 + 768}


@pytest.mark.parametrize(("name", "size"), COUNTS)
def test_parameter_count(name, size):
    config = from_config_dict(importlib.import_module(f"configs.{name}").get_config(size))
    count = flops.n_params(Model(config.model, max_len=8)) - UNUSED.get(name, 0)
    assert round(count / 1e6, 1) == COUNTS[name, size]
