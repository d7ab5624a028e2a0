"""Scan, rematerialization and sharding do not change the model's results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.harness import configs
from seqjax.models import Model
from seqjax.models.remat import ATTENTION_NAMES
from seqjax.nn import params as params_lib
from seqjax.sharding import batch_sharding, make_mesh, shardings
from seqjax.testing import loss_and_grads
from seqjax.training.step import init_state, make_train_step
from tests import support
from tests.kernels.common import count_primitive

B, T = 8, 23


@functools.cache
def reference(mixer, variant):
    """Return the reference form: scanned, without rematerialization, one device, float32."""
    model = support.tiny_model(mixer, variant)
    weights, tokens = support.random_params(model), support.random_tokens((B, T + 1))
    return model, weights, tokens, *loss_and_grads(model, weights, tokens)


# A key bias shifts all scores of a query equally and cancels in the softmax, so its gradient is rounding error.
ZERO = {"blocks.0.mixer.k.b"}


def assert_same(got, want, *, rtol=1e-4):
    """Compare all leaves, with an absolute tolerance relative to each leaf's largest entry."""
    for (name, a), (_, b) in zip(params_lib.names(got), params_lib.names(want), strict=True):
        if name in ZERO and float(np.abs(b).max()) < 1e-5:
            continue
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(np.abs(b).max()), err_msg=name)


FORMS = {
    "unrolled": {"model__scan_layers": False},
    "remat_full": {"model__remat": "full"},
    "remat_attention": {"model__remat": "attention"},
    "remat_dots": {"model__remat": "dots"},
    "remat_attention_unrolled": {"model__remat": "attention", "model__scan_layers": False},
    "loss_in_chunks": {"model__loss_chunk": 5},
}
# The first three forms depend on the mixer, so they run with all mixers; the others run with one or two.
FORM_CASES = [(*case, form) for case in support.FIRST for form in list(FORMS)[:3]] + [
    ("transformer_pp", "full", "remat_dots"),
    ("rwkv7_shell", "top1_exact", "remat_dots"),
    ("top1_chunk", "exact", "remat_attention_unrolled"),
    ("transformer_pp", "full", "loss_in_chunks"),
]


def is_quick(mixer, variant, form):
    """Return whether a case is quick; unrolled recurrent mixers take twice as long to compile as others."""
    quick = {"remat_full": ("transformer_pp",), "remat_attention": ("top1_chunk",), "remat_attention_unrolled": ()}
    quick["unrolled"] = ("transformer_pp",)
    return support.represents(mixer, variant) and mixer in quick.get(form, (mixer,))


@pytest.mark.parametrize(("mixer", "variant", "form"), support.slow_unless(is_quick, FORM_CASES))
def test_form_does_not_change_the_result(mixer, variant, form):
    _, weights, tokens, loss, grads = reference(mixer, variant)
    got_loss, got_grads = loss_and_grads(support.tiny_model(mixer, variant, **FORMS[form]), weights, tokens)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    assert_same(got_grads, grads)


@pytest.mark.parametrize(("mixer", "name"), [("top1_chunk", "top1_selection"), ("top1_chunk", "attention_out")])
def test_remat_attention_names_occur_in_the_program(mixer, name):
    """The policy saves values by name, so the program must use the listed names."""
    model = support.tiny_model(mixer)
    tokens = support.random_tokens((2, T))
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(model.hidden(p, tokens))))(model.init(jax.random.key(0)))
    assert f"name={name}" in str(jaxpr)
    assert name in ATTENTION_NAMES


@pytest.mark.parametrize("mixer", ["top1_chunk", pytest.param("rwkv7_shell", marks=pytest.mark.slow)])
def test_remat_dots_recomputes_no_product_or_selection(mixer):
    tokens, calls = support.random_tokens((2, T + 1)), {}
    for remat in ("none", "dots", "full"):
        model = support.tiny_model(mixer, model__remat=remat)
        gradient = jax.make_jaxpr(jax.grad(lambda p, model=model: model.loss(p, tokens)[0]))(model.shapes)
        calls[remat] = [count_primitive(gradient.jaxpr, name) for name in ("dot_general", "argmax")]
    assert calls["none"] == calls["dots"]
    assert all(twice > once for twice, once in zip(calls["full"], calls["dots"], strict=True))


def test_remat_dots_fits_the_longest_context():
    """RWKV-7's shell saves the most: at 102,400 tokens, less than half of an 80 GB GPU."""
    name = "rwkv7_shell:model.dtype=bfloat16"
    config = configs.configured(name, "135m_100k", batch=1, seq_len=102_400, remat="dots")
    model = Model(config.model, max_len=config.train.seq_len)
    tokens = jax.ShapeDtypeStruct((1, config.train.seq_len + 1), jnp.int32)
    saved = jax.eval_shape(lambda p, t: jax.vjp(lambda p: model.loss(p, t)[0], p)[1], model.shapes, tokens)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved)) < 40 * 2**30


@pytest.mark.parametrize(
    ("mixer", "variant"),
    support.slow_unless(lambda mixer, _: mixer in ("top1_chunk", "transformer_pp"), support.FIRST),
)
def test_eight_devices_equal_one(mixer, variant):
    model, weights, tokens, loss, grads = reference(mixer, variant)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    specs = shardings(mesh, model.shapes, model.axes)
    placed = jax.device_put(weights, specs)
    split = [x.sharding.spec for x in jax.tree.leaves(placed) if not x.sharding.is_fully_replicated]
    assert len(split) > 5  # so the comparison covers sharded parameters
    with jax.set_mesh(mesh):
        got_loss, got_grads = loss_and_grads(model, placed, jax.device_put(tokens, batch_sharding(mesh)))
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    assert_same(got_grads, grads)


@pytest.mark.parametrize(
    ("mixer", "variant"),
    support.slow_unless(lambda *case: case == ("top1_chunk", "exact"), support.CASES),
)
def test_bfloat16_gradients_are_finite(mixer, variant):
    model = support.tiny_model(mixer, variant, model__dtype="bfloat16")
    weights, tokens = support.random_params(model), support.random_tokens((B, T + 1))
    assert jax.eval_shape(model.hidden, weights, tokens[:, 1:]).dtype == jnp.bfloat16
    loss, grads = loss_and_grads(model, weights, tokens)
    for name, g in params_lib.names(grads):
        assert g.dtype == jnp.float32, name
        assert np.isfinite(g).all(), name
        assert np.abs(g).max() > 0, f"{name} gets no gradient"
    if (mixer, variant) in support.FIRST:
        np.testing.assert_allclose(loss, reference(mixer, variant)[3], rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "variant"), support.slow_unless(lambda mixer, _: mixer == "top1_chunk", support.FIRST)
)
def test_training_memorizes_a_tiny_set_without_retracing(mixer, variant):
    model = support.tiny_model(mixer, variant, train__seq_len=16)
    optimizer = optax.adam(1e-2)
    step = jax.jit(make_train_step(model, optimizer), donate_argnums=0)
    state = jax.jit(lambda: init_state(model, optimizer, jax.random.key(0)))()
    tokens = support.random_tokens((1, 4, 17))
    losses = []
    for _ in range(80):
        state, metrics = step(state, tokens, 1.0)
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1
    assert abs(losses[0] - np.log(48)) < 0.5
    assert losses[-1] < 0.2 * losses[0], f"{losses[0]:.2f} -> {losses[-1]:.2f}"
    assert int(state.step) == 80


def test_tied_head_equals_the_embedding():
    tied = support.tiny_model("transformer_pp")
    untied = support.tiny_model("transformer_pp", model__tie_embeddings=False)
    assert "head" not in tied.shapes
    assert untied.shapes["head"].shape == (32, 48)
    weights = support.random_params(untied)
    tokens = support.random_tokens((1, 4))
    logits = jax.jit(untied.logits)
    separate, shared = logits(weights, tokens), logits({**weights, "head": weights["embed"].T}, tokens)
    headless = {name: x for name, x in weights.items() if name != "head"}
    np.testing.assert_allclose(shared, jax.jit(tied.logits)(headless, tokens), rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(separate - shared)).max() > 0.1


def test_learned_positions_in_parallel_and_recurrent_form():
    model = support.tiny_model("transformer_pp", model__learned_positions=True, model__mixer__position="none")
    weights = support.random_params(model)
    tokens = support.random_tokens((B, T))
    parallel = jax.jit(model.logits)
    want = parallel(weights, tokens)
    without = {**weights, "positions": jnp.zeros_like(weights["positions"])}
    assert np.abs(np.asarray(want - parallel(without, tokens))).max() > 0.1
    logits, cache = jax.jit(model.prefill)(weights, tokens[:, :7], model.init_cache(B, T))
    np.testing.assert_allclose(logits, want[:, 6], atol=1e-4)
    logits, _ = jax.jit(model.step)(weights, tokens[:, 7], jnp.asarray(7), cache)
    np.testing.assert_allclose(logits, want[:, 7], atol=1e-4)


@pytest.mark.slow
def test_initial_parameters_have_the_stated_spread():
    """N(0, 0.02^2), scaled by 1 / sqrt(2 L) for the two matrices that write to the residual stream; gains 1."""
    config = support.tiny("transformer_pp", model__dim=256, model__n_layers=8, model__mlp__dim=None)
    initial_params = dict(params_lib.names(jax.jit(Model(config.model, max_len=8).init)(jax.random.key(0))))
    for name, x in initial_params.items():
        std = 0.02 / np.sqrt(16) if name.endswith(("mixer.out.w", "mlp.down.w")) else 0.02
        if name.endswith(".g"):
            assert (np.asarray(x) == 1).all(), name
        else:
            assert np.std(x) == pytest.approx(std, rel=0.03), name
            assert abs(np.mean(x)) < 0.05 * std, name
    assert initial_params["blocks.0.mlp.up.w"].shape == (8, 256, 8 * 256 // 3)


def test_residual_stream_may_be_float32():
    model = support.tiny_model("transformer_pp", model__dtype="bfloat16", model__residual_dtype="float32")
    tokens = support.random_tokens((2, 5))
    weights = support.random_params(model)
    assert jax.eval_shape(model.embed, weights, tokens).dtype == jnp.float32
    assert jax.eval_shape(model.hidden, weights, tokens).dtype == jnp.bfloat16


def test_decoding_step_does_not_copy_its_cache():
    # Approx selection reads little of the cache, so XLA's temporary memory must be much smaller than the cache.
    model = support.tiny_model("top1_chunk", "approx")
    cache = jax.eval_shape(lambda: model.init_cache(4, 8192))
    token, position = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    step = jax.jit(lambda *args: model.step(*args), donate_argnums=3)
    memory = (
        step.lower(jax.eval_shape(model.init, jax.random.key(0)), token, position, cache).compile().memory_analysis()
    )
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 8


@pytest.mark.parametrize(("shape", "dtype", "error"), [((7,), "int32", ValueError), ((1, 7), "float32", TypeError)])
@pytest.mark.parametrize("form", ["logits", "hidden", "loss", "sequence_losses", "token_losses", "prefill"])
def test_bad_tokens_error_is_one_line(form, shape, dtype, error):
    model = support.tiny_model("transformer_pp")
    cache = [model.init_cache(1, 8)] if form == "prefill" else []
    pattern = r"\(7,\)" if error is ValueError else "float32"
    with pytest.raises(error, match=rf"^tokens_BT1? [^\n]*{pattern}[^\n]*$"):
        getattr(model, form)(support.random_params(model), jnp.ones(shape, dtype), *cache)


def test_bad_weights_and_step_tokens_are_refused():
    model = support.tiny_model("transformer_pp")
    params, tokens = support.random_params(model), support.random_tokens((2, 7))
    with pytest.raises(ValueError, match=r"^weights_BT [^\n]*\(2, 7\)[^\n]*\(2, 6\)"):
        model.loss(params, tokens, jnp.ones((2, 7)))
    with pytest.raises(ValueError, match=r"^token_B [^\n]*\(2, 7\)"):
        model.step(params, tokens, jnp.asarray(0), model.init_cache(2, 8))
