"""MoBA, a config of Top-1 Chunk.

It is compared with a float64 mask, full attention, and Top-1 Chunk's selection.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers
from seqjax.config import differences, from_config_dict, to_dict
from seqjax.ops.attention import causal_attention
from tests import support

HEADS, K = 3, 8


def config(text=""):
    return importlib.import_module("configs.moba").get_config(",".join(["debug", text] if text else ["debug"]))


def layer(block_size, most):
    """Build the config's mixer with `most` blocks per query.

    They include the query's block.
    """
    mixer_config = config(f"model.mixer.chunk_size={block_size},model.mixer.top_k={most - 1}").model.mixer.to_dict()
    settings: Any = {key: value for key, value in mixer_config.items() if key != "name"} | {
        "heads": HEADS,
        "head_dim": K,
    }
    assert mixer_config["name"] == "top1_chunk"
    return mixers.Top1Chunk(24, **settings, rngs=nnx.Rngs(0))


def qkv(length):
    rng = np.random.default_rng(length)
    return [jnp.asarray(rng.normal(size=(2, length, HEADS, K))) for _ in range(3)]


def read(q, k, *, block_size, most):
    """Return the mask [B, T, H, T] of `most` blocks.

    It has the query's block and the blocks with the largest unscaled q . mean key.
    """
    length = q.shape[1]
    n_past = (length - 1) // block_size
    means = np.asarray(k[:, : n_past * block_size]).reshape(2, n_past, block_size, HEADS, K).mean(2)
    gate = np.einsum("bthk,bchk->bthc", np.asarray(q), means)
    mask = np.zeros((2, length, HEADS, length), bool)
    for b, t, h in np.ndindex(2, length, HEADS):
        own = t // block_size
        best = np.argsort(-gate[b, t, h, :own], kind="stable")[: most - 1]
        for c in (own, *best):
            mask[b, t, h, c * block_size : (c + 1) * block_size] = True
    return mask & np.tri(length, dtype=bool)[:, None]


def dense(mask, q, k, v):
    p = jax.nn.softmax(jnp.where(mask, jnp.einsum("bthk,bshk->bths", q, k) / np.sqrt(K), -jnp.inf), axis=-1)
    return jnp.einsum("bths,bshk->bthk", p, v)


@pytest.mark.parametrize(
    ("length", "block_size", "most"),
    support.slow_unless(lambda length, *_: length in (53, 7), [(53, 4, 3), (41, 8, 2), (31, 3, 6), (7, 8, 3)]),
)
def test_attention_and_gradients_match_a_dense_mask(length, block_size, most):
    """The selection has no gradient, and lengths are not multiples of the block size."""
    with jax.enable_x64(True):
        operands = qkv(length)
        weight = qkv(length + 1)[0][:, :length]
        chosen = read(*operands[:2], block_size=block_size, most=most)
        want, pull = jax.vjp(jax.jit(functools.partial(dense, chosen)), *operands)
        got, pull_ours = jax.vjp(jax.jit(layer(block_size, most).attend), *operands)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
        for ours, theirs in zip(pull_ours(weight), pull(weight), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11 * np.abs(theirs).max())


@pytest.mark.slow
def test_selecting_all_blocks_equals_full_attention():
    with jax.enable_x64(True):
        operands = qkv(53)
        want = causal_attention(*operands, implementation="chunked")  # XLA's attention computes its softmax in float32
        np.testing.assert_allclose(layer(8, 7).attend(*operands), want, rtol=0, atol=1e-12)


def test_two_blocks_equal_top1_chunk_with_mean_keys_and_no_qk_norm():
    top1 = importlib.import_module("configs.top1_chunk").get_config(
        "debug,model.mixer.selection=approx,model.mixer.qk_norm=False"
    )
    got, want = (to_dict(from_config_dict(each)) for each in (config("model.mixer.top_k=1"), top1))
    assert len(changed := differences(want, got)) == 1, changed
    assert changed[0].startswith("name:")


def test_three_of_sixteen_blocks_are_read_at_2048_tokens():
    """The paper reads the same share at 8,192 tokens."""
    model = from_config_dict(importlib.import_module("configs.moba").get_config("110m"))
    assert model.train.seq_len / model.model.mixer.chunk_size == 16
    assert model.model.mixer.top_k + 1 == 3


@pytest.mark.slow
def test_a_model_without_qk_norm_trains_in_bfloat16():
    model = support.Model(from_config_dict(config("model.dtype=bfloat16,model.mixer.chunk_size=4")).model, max_len=31)
    weights, tokens = support.random_params(model), support.random_tokens((2, 32))
    grads = jax.jit(jax.grad(lambda p: model.loss(p, tokens)[0]))(weights)
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(grads))
