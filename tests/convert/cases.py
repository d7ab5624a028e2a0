"""The tiny public models in tests/golden/convert and the matching seqjax configs."""

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import safetensors.numpy

from seqjax.config import Config, from_config_dict
from seqjax.nn.params import names

GOLDEN = Path(__file__).parent.parent / "golden" / "convert"
# Directory of the public model -> our config file and the overrides to its debug size.
CASES = {
    "llama": (
        "transformer_pp",
        "model.vocab_size=264,model.dim=24,model.n_layers=3,model.mixer.heads=4,model.mixer.kv_heads=2,"
        "model.mlp.dim=40,model.mlp.kind=swiglu,model.norm_eps=1e-6,model.mixer.rope_base=5e4,"
        "model.tie_embeddings=False",
    ),
    "llama3": (
        "transformer_pp",
        "model.vocab_size=48,model.dim=24,model.n_layers=2,model.mixer.heads=4,model.mixer.kv_heads=2,"
        "model.mixer.head_dim=16,model.mlp.dim=40,model.mlp.kind=swiglu,model.mixer.rope_base=5e5,"
        "model.mixer.rope_scaling=llama3,model.mixer.rope_factor=4,model.mixer.rope_low_freq_factor=0.25,"
        "model.mixer.rope_high_freq_factor=1,model.mixer.rope_original_len=16",
    ),
    "qwen2": (
        "transformer_pp",
        "model.vocab_size=48,model.dim=24,model.n_layers=2,model.mixer.heads=4,model.mixer.kv_heads=2,"
        "model.mixer.qkv_bias=True,model.mlp.dim=40,model.mlp.kind=swiglu,model.norm_eps=1e-6,"
        "model.tie_embeddings=False",
    ),
    "qwen3": (
        "transformer_pp",
        "model.vocab_size=48,model.dim=24,model.n_layers=2,model.mixer.heads=4,model.mixer.kv_heads=2,"
        "model.mixer.head_dim=8,model.mixer.qk_norm=True,model.mixer.qk_norm_eps=1e-6,model.mlp.dim=40,"
        "model.mlp.kind=swiglu,model.norm_eps=1e-6",
    ),
    "gpt2": ("transformer", "model.vocab_size=48,model.dim=16,model.mlp.dim=64,train.seq_len=32"),
    "mamba": (
        "mamba1",
        "model.vocab_size=48,model.dim=16,model.n_layers=3,model.mixer.state=4,model.mixer.dt_rank=3",
    ),
    "mamba2": (
        "mamba2",
        "model.vocab_size=48,model.dim=16,model.n_layers=2,model.mixer.state=6,model.mixer.head_dim=8,"
        "model.tie_embeddings=False",
    ),
    "rwkv7": (
        "rwkv7",
        "model.vocab_size=48,model.dim=32,model.n_layers=3,model.norm_eps=4e-5,model.mlp.dim=48,"
        "model.mixer.decay_rank=4,model.mixer.eta_rank=5,model.mixer.value_rank=6,model.mixer.gate_rank=7,"
        "model.tie_embeddings=False",
    ),
    "deltanet": ("deltanet", "model.vocab_size=48,model.dim=32,model.mlp.dim=48,model.tie_embeddings=False"),
    "gated_deltanet": (
        "gated_deltanet",
        "model.vocab_size=48,model.dim=32,model.mixer.key_dim=24,model.mlp.dim=48,model.tie_embeddings=False",
    ),
}


def config_of(family: str, **overrides: object) -> Config:
    """Return our config for a golden model; overrides are dotted keys with `__` for the dot."""
    name, argument = CASES[family]
    config = importlib.import_module(f"configs.{name}").get_config(f"debug,{argument}")
    with config.ignore_type():
        config.update_from_flattened_dict({key.replace("__", "."): value for key, value in overrides.items()})
    return from_config_dict(config)


def copied(family: str, directory: Path, *, with_config: bool = False, **changes: object) -> tuple[Path, dict]:
    """Copy a golden model's weights, optionally with config.json plus `changes`; return the file and its tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDEN / family / "model.safetensors", directory)
    if with_config:
        hf_config = json.loads((GOLDEN / family / "config.json").read_text()) | changes
        (directory / "config.json").write_text(json.dumps(hf_config))
    return directory / "model.safetensors", safetensors.numpy.load_file(directory / "model.safetensors")


def assert_equal_trees(got, want) -> None:
    got, want = dict(names(got)), dict(names(want))
    assert got.keys() == want.keys()
    for path, x in want.items():
        np.testing.assert_array_equal(got[path], x, err_msg=path)
