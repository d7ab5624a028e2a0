"""NSA: branches, memory, and empty compressed attention.

The branches are compared with float64 masks.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers
from seqjax.errors import UserError
from seqjax.ops.attention import causal_attention
from tests import support

HEADS, GROUPS, K = 6, 2, 8


def layer(**settings):
    options: Any = {
        "heads": HEADS,
        "kv_heads": GROUPS,
        "head_dim": K,
        "block_size": 4,
        "blocks": 5,
        "window": 7,
    } | settings
    return mixers.NSA(32, **options, rngs=nnx.Rngs(0))


def qkv(length, dtype="float64", gain=2.0):
    """Draw q, k and v with scores spread enough to select different blocks."""
    rng = np.random.default_rng(length)
    sizes = (HEADS, GROUPS, GROUPS)
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, n, K)), dtype) for n in sizes)
    return gain * q, k, v


def softmax(q, keys, mask, xp: Any = jnp):
    s = xp.where(mask, xp.einsum("bthk,bshk->bths", q, keys) / np.sqrt(K), -np.inf)
    e = xp.where(mask, xp.exp(s - xp.where(mask.any(-1, keepdims=True), s.max(-1, keepdims=True), 0)), 0)
    total = e.sum(-1, keepdims=True)
    return e / xp.where(total > 0, total, 1)


def means(x, block_size):
    """Return the means of complete blocks."""
    c = x.shape[1] // block_size
    return x[:, : c * block_size].reshape(2, c, block_size, HEADS, K).mean(2)


def complete(length, block_size):
    """Return the mask of complete blocks per query."""
    ends = (np.arange(length // block_size) + 1) * block_size - 1
    return np.broadcast_to((ends <= np.arange(length)[:, None])[:, None], (2, length, HEADS, len(ends)))


def keys_read(q, k, *, block_size, blocks):
    """Return the mask of keys in the selected blocks.

    It is computed in numpy, because the selection has no gradient.
    """
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    length, each = q.shape[1], HEADS // GROUPS
    p = softmax(q, means(np.repeat(k, each, axis=2), block_size), complete(length, block_size), np)
    score = p.reshape(2, length, GROUPS, each, -1).mean(3)
    read = np.zeros((2, length, GROUPS, -(-length // block_size)), bool)
    for b, t, g in np.ndindex(2, length, GROUPS):
        own = t // block_size
        chosen = {0, max(own - 1, 0), own}
        for x in np.argsort(-score[b, t, g, :own], kind="stable"):
            if len(chosen) < blocks:
                chosen.add(int(x))
        read[b, t, g, sorted(chosen)] = True
    return np.repeat(np.repeat(read, block_size, axis=-1)[..., :length], each, axis=2)


def dense(read, q, k, v, *, block_size, window):
    """Apply three masks over all pairs; `read` marks the selected blocks."""
    length, each = q.shape[1], HEADS // GROUPS
    i, j = np.arange(length)[:, None], np.arange(length)
    k, v = (jnp.repeat(x, each, axis=2) for x in (k, v))
    p = softmax(q, means(k, block_size), complete(length, block_size))
    causal = (j <= i)[:, None]
    near = np.broadcast_to(causal & (i - j < window)[:, None], read.shape)
    branches = ((p, means(v, block_size)), (softmax(q, k, read & causal), v), (softmax(q, k, near), v))
    return jnp.concatenate([jnp.einsum("bths,bshk->bthk", w, x) for w, x in branches], axis=-1)


@pytest.mark.parametrize(
    ("length", "settings"),
    [
        pytest.param(53, {}, marks=pytest.mark.slow),
        (31, {"block_size": 3, "blocks": 3, "window": 1}),
        pytest.param(29, {"block_size": 1, "blocks": 4, "window": 40}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_branches_and_gradients_match_dense_masks(length, settings):
    made = layer(**settings)
    with jax.enable_x64(True):
        operands = qkv(length)
        read = keys_read(*operands[:2], block_size=made.block_size, blocks=made.blocks)
        masked = functools.partial(dense, read, block_size=made.block_size, window=made.window_size)
        weight = jnp.asarray(np.random.default_rng(0).normal(size=(2, length, HEADS, 3 * K)))
        want, pull = jax.vjp(jax.jit(masked), *operands)
        got, pull_ours = jax.vjp(jax.jit(made.attend), *operands)
        # XLA's attention, used for the window here, computes its softmax in float32.
        np.testing.assert_allclose(got[..., : 2 * K], want[..., : 2 * K], rtol=0, atol=1e-12)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
        weight = weight.at[..., 2 * K :].set(0)
        for ours, theirs in zip(pull_ours(weight), pull(weight), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11 * np.abs(theirs).max())


def test_bfloat16_rounds_only_inputs_and_weights():
    """The selection is exact for bfloat16 operands.

    Weights and outputs round to 8 bits.
    """
    made, operands = layer(), qkv(53, "bfloat16")
    got = jax.jit(made.attend)(*operands)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in operands]
        read = keys_read(*wide[:2], block_size=4, blocks=5)
        want = jax.jit(functools.partial(dense, read, block_size=4, window=7))(*wide)
    assert got.dtype == jnp.bfloat16
    error = np.abs(np.asarray(got, np.float64) - np.asarray(want))
    assert error.max() < 3 * 2**-8 * np.abs(want).max()


def test_maximal_blocks_and_window_equal_full_attention():
    made, operands = layer(blocks=14, window=53), qkv(53, "float32")
    _, selected, window = jnp.split(jax.jit(made.attend)(*operands), 3, axis=-1)
    want = causal_attention(*operands)
    np.testing.assert_allclose(selected, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(window, want, rtol=0, atol=1e-5)


def test_queries_without_a_complete_block_get_zero_from_means():
    """The output is zero and gradients are finite."""
    made, operands = layer(block_size=8), qkv(19, "float32")
    compressed = jax.jit(lambda *a: made.attend(*a)[..., :K])
    assert not np.any(compressed(*operands)[:, :7])
    assert np.all(np.any(compressed(*operands)[:, 7:], axis=(0, 3)))
    for grad in jax.jit(jax.grad(lambda *a: compressed(*a).sum(), argnums=(0, 1, 2)))(*operands):
        assert np.isfinite(grad).all()
        assert np.any(grad)
    short = qkv(5, "float32")
    assert not np.any(compressed(*short)), "the sequence has no complete block"


def test_training_never_holds_all_scores():
    """Check the training program at 2,048 tokens."""
    made = layer(block_size=32, blocks=8, window=256)
    shapes = [jax.ShapeDtypeStruct((1, 2048, n, K), jnp.float32) for n in (HEADS, GROUPS, GROUPS)]
    step = jax.grad(lambda *a: (made.attend(*a) ** 2).sum(), argnums=(0, 1, 2))
    program = str(jax.jit(step).lower(*shapes).compile().as_text())
    arrays = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", program)}
    assert any(2048 in dims for dims in arrays)
    assert max(int(np.prod(dims)) for dims in arrays) < 2048 * 2048


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocks": 2}, "mixer.blocks=2 .*3"),
        ({"block_size": 24}, "mixer.block_size=24 .*config.train.seq_len=23"),
        ({"block_size": 0}, "mixer.block_size=0 "),
        ({"window": 0}, "mixer.window .*0"),
        ({"kv_heads": 3}, "mixer.kv_heads=3 .*heads=4"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        support.tiny_model("nsa", **{f"model__mixer__{key}": value for key, value in settings.items()})
