"""FoX: open gates give attention without positions.

Closed gates leave a query only its own value.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.errors import UserError
from tests import support

T = 23


def with_gates(weights, logit):
    """Return weights with every gate logit set to `logit`, and without gates."""
    mixer = weights["blocks"]["0"]["mixer"]
    forget = {"w": jnp.zeros_like(mixer["forget"]["w"]), "b": jnp.full_like(mixer["forget"]["b"], logit)}
    bare = {name: value for name, value in mixer.items() if name != "forget"}
    return tuple(
        {**weights, "blocks": {"0": {**weights["blocks"]["0"], "mixer": layer}}}
        for layer in (bare | {"forget": forget}, bare)
    )


def test_open_gates_equal_attention_without_positions():
    """Transformer++ with the same parameters and block gives the same outputs."""
    fox = support.tiny_model("fox", "window_gqa")
    block = {"model__norm_eps": 1e-6, "model__mlp__kind": "swiglu", "model__mixer__position": "none"}
    full = support.tiny_model("transformer_pp", "window", model__mixer__kv_heads=2, **block)
    gated, bare = with_gates(support.random_params(fox), 100.0)
    tokens = support.random_tokens((2, T))
    want = jax.jit(full.logits)(bare, tokens)
    np.testing.assert_allclose(jax.jit(fox.logits)(gated, tokens), want, rtol=1e-5, atol=1e-5)
    closed, _ = with_gates(gated, -100.0)
    assert np.abs(jax.jit(fox.logits)(closed, tokens) - want).max() > 0.1


@pytest.mark.parametrize("logit", [-100.0, 100.0])
def test_saturated_gates_have_finite_gradients(logit):
    model = support.tiny_model("fox", model__dtype="bfloat16")
    weights, _ = with_gates(support.random_params(model), logit)
    grads = jax.jit(jax.grad(lambda p: model.loss(p, support.random_tokens((2, T + 1)))[0]))(weights)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    "settings",
    support.slow_unless(
        lambda settings: "kv_shift" in settings, [{"window": 5, "kv_heads": 2}, {"kv_shift": True, "qk_norm": True}]
    ),
    ids=str,
)
def test_chunked_prefill_equals_the_parallel_form(settings):
    """Use pieces shorter and longer than the window, and single tokens.

    The ring buffer is overwritten several times.
    """
    model = support.tiny_model("fox", **{f"model__mixer__{key}": value for key, value in settings.items()})
    weights = support.random_params(model)
    layer = model.blocks["0"].bind(jax.tree.map(lambda x: x[0], weights["blocks"]["0"])).mixer
    x_BTD = jnp.asarray(np.random.default_rng(1).standard_normal((2, 41, 32), np.float32))
    want, following = jax.jit(layer)(x_BTD), jax.jit(lambda x, cache: layer.prefill_next(x, cache))
    cache, parts, start = layer.init_cache(2, 41, jnp.float32), [], 0
    for n in (3, 1, 9, 1, 1, 9, 3, 1, 1, 9, 3):
        y_BTD, cache = following(x_BTD[:, start : start + n], cache)
        parts.append(y_BTD)
        start += n
    assert int(cache.length) == start == 41
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


def test_kv_shift_with_conv_is_refused():
    with pytest.raises(UserError, match=r"mixer\.kv_shift.*conv"):
        support.tiny("fox", model__mixer__conv=True, model__mixer__kv_shift=True)
