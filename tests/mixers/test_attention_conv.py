"""The convolutions of q, k and v.

The tests cover parameters, equations, the decoding cache and sharding. tests/models/test_against_numpy.py compares
their equations within whole models.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax import testing
from seqjax.errors import UserError
from seqjax.mixers._attention import ConvKVCache, KVCache
from seqjax.mixers.top1_chunk import Top1Cache
from seqjax.models import flops
from seqjax.nn import params as params_lib
from seqjax.ops import attention
from tests import support

T = 23
MIXERS = ("transformer", "transformer_pp", "top1_chunk", "top1_element")
KINDS = ("transformer_pp", "top1_chunk")
each_kind = pytest.mark.parametrize("mixer", support.slow_unless(lambda mixer: mixer in KINDS, MIXERS))
SIZES = [{}, {"kv_heads": 2}, {"heads": 2, "kv_heads": 1, "head_dim": 6}]


def model_of(mixer: str, **settings):
    return support.tiny_model(mixer, **{f"model__mixer__{key}": value for key, value in settings.items()})


def bound(model, weights):
    """Return the first layer's mixer."""
    return model.blocks["0"].bind(jax.tree.map(lambda x: x[0], weights["blocks"]["0"])).mixer


def without_conv(tree):
    return {k: without_conv(x) for k, x in tree.items() if k != "conv"} if isinstance(tree, dict) else tree


def random_inputs(n_tokens: int = T, seed: int = 1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, n_tokens, 32), np.float32))


@pytest.mark.parametrize("settings", SIZES, ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_conv_is_off_by_default_and_adds_four_parameters_per_channel(mixer, settings):
    plain, conv = model_of(mixer, **settings), model_of(mixer, conv=True, **settings)
    assert not plain.config.mixer.conv
    heads, kv_heads = settings.get("heads", 4), settings.get("kv_heads", 4)
    channels = (heads + 2 * kv_heads) * settings.get("head_dim", 32 // heads)
    added = flops.n_params(conv) - flops.n_params(plain)
    assert added == conv.config.n_layers * 4 * channels
    assert flops.flops_per_token(conv, T) - flops.flops_per_token(plain, T) == 6 * added
    names = {name for name, _ in params_lib.names(conv.shapes)} - {name for name, _ in params_lib.names(plain.shapes)}
    assert names == {f"blocks.0.mixer.conv.{of}.w" for of in "qkv"}


@each_kind
def test_conv_keeps_initial_values_of_other_parameters(mixer):
    init = [jax.jit(model_of(mixer, conv=conv).init)(jax.random.key(0)) for conv in (False, True)]
    without, with_conv = (dict(params_lib.names(weights["blocks"]["0"]["mixer"])) for weights in init)
    for name, x in without.items():
        np.testing.assert_array_equal(with_conv[name], x, err_msg=name)


@pytest.mark.parametrize("settings", support.slow_unless(lambda settings: "heads" in settings, SIZES), ids=str)
def test_q_k_and_v_are_projections_plus_their_convolutions(settings):
    """Compare q, k and v with loops over channels, taps and tokens.

    q and k include QK norm; v comes from a prompt's cache.
    """
    model = model_of("transformer_pp", conv=True, qk_norm=True, position="none", **settings)
    weights = support.random_params(model)
    mixer, x_BTD = bound(model, weights), random_inputs()
    p = params_lib.unstack(weights["blocks"]["0"]["mixer"], 2)[0]
    want = {}
    for name in "qkv":
        y_BTE = np.asarray(x_BTD, np.float64) @ np.asarray(p[name]["w"], np.float64)
        taps, total = np.asarray(p["conv"][name]["w"], np.float64), y_BTE.copy()
        for t in range(T):
            for i in range(4):
                if t - 3 + i >= 0:
                    total[:, t] += taps[:, i] * y_BTE[:, t - 3 + i]
        want[name] = total.reshape(2, T, -1, mixer.head_dim)
    for name in "qk":
        scale = np.sqrt((want[name] ** 2).mean(-1, keepdims=True) + 1e-5)
        want[name] = want[name] / scale * np.asarray(p[f"{name}_norm"]["g"])
    q_BTHK, k_BTGK = jax.jit(mixer.queries_and_keys)(x_BTD)
    _, cache = jax.jit(mixer.prefill)(x_BTD, mixer.init_cache(2, T, jnp.float32))
    got = {"q": q_BTHK, "k": k_BTGK, "v": cache.attention.v_BSGK}
    for name in "qkv":
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5, err_msg=name)


@each_kind
def test_zero_taps_equal_no_convolution(mixer):
    plain, conv = model_of(mixer), model_of(mixer, conv=True)
    weights, tokens = support.random_params(conv), support.random_tokens((2, T))
    no_taps = jax.tree_util.tree_map_with_path(lambda path, x: x * ("conv" not in jax.tree_util.keystr(path)), weights)
    want = jax.jit(plain.logits)(without_conv(weights), tokens)
    np.testing.assert_allclose(jax.jit(conv.logits)(no_taps, tokens), want, rtol=1e-5, atol=1e-5)
    assert np.abs(jax.jit(conv.logits)(weights, tokens) - want).max() > 0.1


# ------------------------------------------------------------------------------------------------------------ decoding
def test_conv_wraps_the_attention_cache():
    for mixer, kind in (("transformer_pp", KVCache), ("top1_element", KVCache), ("top1_chunk", Top1Cache)):
        caches = []
        for conv in (False, True):
            model = model_of(mixer, conv=conv, kv_heads=2)
            caches.append(bound(model, support.random_params(model)).init_cache(3, T, jnp.bfloat16))
        assert type(caches[0]) is kind
        assert type(caches[1]) is ConvKVCache
        assert jax.tree.structure(caches[1].attention) == jax.tree.structure(caches[0])
        last = [x.shape for x in caches[1][1:]]
        assert last == [(3, 3, 32), (3, 3, 16), (3, 3, 16)]
        assert {x.dtype for x in caches[1][1:]} == {jnp.dtype(jnp.bfloat16)}


DECODED = [
    ("transformer_pp", {"window": 5, "kv_heads": 2}),
    ("transformer_pp", {"window": 2, "position": "alibi"}),  # the window is shorter than the filter
    ("transformer_pp", {"temperature": 0.5}),
    ("transformer", {}),
    ("top1_chunk", {}),
    ("top1_chunk", {"selection": "approx", "kv_heads": 2}),
    ("top1_element", {"kv_heads": 2}),
    ("nsa", {"block_size": 4, "blocks": 4, "window": 5, "kv_heads": 2}),
]


@pytest.mark.parametrize(
    ("mixer", "settings"),
    support.slow_unless(lambda mixer, settings: "selection" in settings, DECODED),
    ids=str,
)
def test_chunked_prefill_equals_the_parallel_form(mixer, settings, monkeypatch):
    """Chunked prefill and decoding equal the parallel form, far past the window.

    Pieces are shorter than the filter, shorter than the window, and longer than both.
    """
    monkeypatch.setattr(attention, "GROUP", 4)
    model = model_of(mixer, conv=True, **settings)
    layer, x_BTD = bound(model, support.random_params(model)), random_inputs(41)
    want, step = jax.jit(layer)(x_BTD), jax.jit(lambda x_BD, cache: layer.step(x_BD, cache))
    first, following = (jax.jit(lambda x, cache, of=of: of(x, cache)) for of in (layer.prefill, layer.prefill_next))
    y_BTD, cache = first(x_BTD[:, :2], layer.init_cache(2, 41, jnp.float32))
    parts, start = [y_BTD], 2
    for n in (1, 3, 9):
        y_BTD, cache = following(x_BTD[:, start : start + n], cache)
        parts.append(y_BTD)
        start += n
    for t in range(start, 41):
        y_BD, cache = step(x_BTD[:, t], cache)
        parts.append(y_BD[:, None])
    assert int(cache.length) == 41
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


# ------------------------------------------------------------------------------------------------------------- devices
@pytest.mark.skipif(jax.device_count() == 1, reason="several devices wanted")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "variant"), [("transformer_pp", "conv_window_gqa"), ("top1_chunk", "conv"), ("top1_element", "conv")]
)
def test_many_devices_equal_one(mixer, variant):
    """Batch, parameters and channels are split.

    The file tests/models/test_sequence_split.py splits time.
    """
    testing.check_sharding(testing.Case(support.tiny_model(mixer, variant)))


# ------------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize("const", ["k", "qk"])
def test_conv_refuses_constant_queries_and_keys(const):
    with pytest.raises(UserError, match=rf"mixer\.conv .*const='{const}'"):
        support.tiny("transformer_pp", model__mixer__conv=True, model__mixer__const=const)
