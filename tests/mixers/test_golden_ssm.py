"""Outputs and gradients stored from public implementations.

tests/golden/make_*.py created the arrays.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from seqjax import mixers, ops
from seqjax.config import from_config_dict
from seqjax.models import Model
from seqjax.nn.params import Template
from seqjax.ops.log_linear import log_linear
from tests.support import ROOT


def golden(name):
    with np.load(ROOT / "tests" / "golden" / f"{name}.npz") as file:
        return dict(file)


def tree(arrays, prefix):
    """Build a nested dict from flat names: 'p.norm.g' -> {'norm': {'g': ...}}."""
    out = {}
    for name, x in arrays.items():
        if name.startswith(prefix):
            *path, last = name.removeprefix(prefix).split(".")
            node = out
            for key in path:
                node = node.setdefault(key, {})
            node[last] = jnp.asarray(x)
    return out


def close(got, want, tolerance=2e-5):
    """Compare float32 results relative to the largest value.

    Both use different summation orders.
    """
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max())), got, want
    )


DELTA = {"heads": 2, "key_dim": 6, "value_dim": 8, "chunk_size": 8, "norm_eps": 1e-5}
SETTINGS = {
    "mamba1": {"state": 4, "dt_rank": 2, "chunk_size": 3},
    "mamba2": {"state": 4, "head_dim": 4, "chunk_size": 8},
    "mamba3": {"state": 8, "head_dim": 4, "chunk_size": 8},
    "mamba3_norm": {"state": 8, "head_dim": 4, "chunk_size": 8, "angles": 4, "norm": True},
    "nsa": {"heads": 32, "kv_heads": 2, "head_dim": 4, "block_size": 3, "blocks": 4, "window": 5},
    "kda": DELTA,
    "kda_bounded": DELTA | {"lower_bound": -5.0},
    "gdn2": DELTA | {"channel_gates": True},
    "gla": {"heads": 2, "chunk_size": 8, "norm_eps": 1e-5},
    "fox": {"heads": 2, "qk_norm": True, "norm_eps": 1e-5},
    "path": {"heads": 2, "chunk_size": 8},
    "path_fox": {"heads": 2, "chunk_size": 8, "forget_gate": True},
    "gated_deltaproduct": DELTA,
    "mla": {"heads": 2, "head_dim": 4, "shared_dim": 2, "value_head_dim": 3, "kv_rank": 5, "position": "none"},
    "mla_rope": {
        "heads": 2, "head_dim": 3, "shared_dim": 4, "value_head_dim": 9, "kv_rank": 6, "q_rank": 4, "rope_base": 100.0,
    },
    "qwen3_attention": {
        "heads": 2, "kv_heads": 1, "head_dim": 8, "rope_share": 0.5, "rope_base": 100.0, "qk_norm": True,
        "qk_norm_eps": 1e-6, "gate": True,
    },
    "qwen3_deltanet": {"heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 8, "chunk_size": 8},
    "mesa_net": {"heads": 2, "chunk_size": 8, "norm_eps": 1e-5},
    "ttt_linear": {"heads": 2},
    "parallax": {"heads": 2, "kv_heads": 1, "qk_norm": True},
    "wall": {"heads": 2, "kv_heads": 1, "qk_norm": True, "gate": True},
    "comba": DELTA,
    "precond_gated_deltanet": DELTA,
    "precond_kda": DELTA,
}  # fmt: skip
MIXERS = {"path_fox": "path", "mamba3_norm": "mamba3", "kda_bounded": "kda", "gdn2": "kda"}
MIXERS |= {"mla_rope": "mla", "qwen3_attention": "transformer_pp", "qwen3_deltanet": "gated_deltanet"}


@pytest.mark.parametrize("name", SETTINGS)
def test_layers_match_the_references(name):
    arrays = golden(name)
    mixer = mixers.load(MIXERS.get(name, name))
    template = Template(lambda rngs, _: mixer(8, **SETTINGS[name], rngs=rngs))
    params, x = tree(arrays, "p."), jnp.asarray(arrays["x"])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, template.shapes)

    def loss(params, x):
        y = template.bind(params)(x)
        return jnp.sum(y * arrays["weight"]), y

    (_, y), (grads, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    close(y, arrays["y"])
    close((grads, dx), (tree(arrays, "g."), arrays["dx"]), 5e-5)


def test_moba_matches_the_reference():
    """Three blocks of 4 per query, including the query's block, at 21 tokens."""
    arrays = golden("moba")
    options = {"chunk_size": 4, "selection": "approx", "top_k": 2}

    def loss(q, k, v):
        o = kernels_pallas.top1_chunk_attention(q, k, v, **options)
        return jnp.sum(o * arrays["weight"]), o

    qkv = [jnp.asarray(arrays[name]) for name in "qkv"]
    (_, o), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    close(o, arrays["o"])
    close(grads, tuple(arrays[f"d{name}"] for name in "qkv"))


def test_log_linear_matches_the_reference():
    """Six levels at 21 tokens: three within chunks of 4, three across chunks."""
    arrays, names = golden("log_linear"), ("x", "log_a", "b", "c", "m")

    def loss(*inputs):
        y = log_linear(*inputs, chunk_size=4)
        return jnp.sum(y * arrays["weight"]), y

    inputs = [jnp.asarray(arrays[name]) for name in names]
    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=range(5), has_aux=True))(*inputs)
    close(y, arrays["y"])
    close(grads, tuple(arrays[f"d{name}"] for name in names), 5e-5)


def model(name, n_positions, **changes):
    config = importlib.import_module(f"configs.{name}").get_config("debug")
    settings = {"dim": 8, "n_layers": 2, "vocab_size": 24} | changes
    with config.ignore_type():
        config.update_from_flattened_dict({f"model.{key}": value for key, value in settings.items()})
    return Model(from_config_dict(config).model, max_len=n_positions)


def test_gpt2_matches_the_reference():
    arrays = golden("gpt2")
    gpt = model("transformer", 16, **{"mixer.heads": 2, "mlp.dim": 32})
    params, tokens = tree(arrays, "p."), jnp.asarray(arrays["tokens"], jnp.int32)
    close(gpt.logits(params, tokens[:, :-1]), arrays["logits"])
    loss, grads = jax.jit(jax.value_and_grad(lambda p: gpt.loss(p, tokens)[0]))(params)
    np.testing.assert_allclose(loss, arrays["loss"], rtol=1e-5)
    close(grads, tree(arrays, "g."), 5e-5)


@pytest.mark.parametrize(("name", "ranks"), [("rwkv5", {}), ("rwkv6", {"mixer.shift_rank": 3, "mixer.decay_rank": 5})])
def test_rwkv_models_match_the_reference(name, ranks):
    arrays = golden(name)
    changes = {"mixer.head_dim": 4, "mixer.chunk_size": 8, "mlp.dim": 12, "tie_embeddings": False}
    rwkv = model(name, 21, **changes | ranks)
    logits = rwkv.logits(tree(arrays, "p."), jnp.asarray(arrays["tokens"], jnp.int32)[None])
    close(logits[0], arrays["logits"], 5e-5)


CORES = {
    "wkv6": (ops.wkv6, ("r", "k", "v", "log_w", "u"), 8, 2e-5),
    # The reference divides by sum + 1e-6.
    "based": (ops.taylor_linear_attention, ("q", "k", "v"), 8, 2e-5),
}


@pytest.mark.parametrize("name", CORES)
def test_cores_match_the_references(name):
    op, names, chunk, tolerance = CORES[name]
    arrays = {k: np.moveaxis(x, 1, 2) if x.ndim == 4 else x for k, x in golden(name).items()}

    def loss(inputs):
        y = op(*inputs, chunk_size=chunk)
        return jnp.sum(y * arrays["weight"]), y

    inputs = [jnp.asarray(arrays[k]) for k in names]
    (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
    close(y, arrays["y"], tolerance)
    close(grads, [arrays[f"d{k}"] for k in names], 5 * tolerance)
