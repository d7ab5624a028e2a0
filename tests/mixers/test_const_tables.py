"""Constant queries and keys from tables.

A softmax shared by the batch equals separate ones, and sequences end with the tables.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.decoding import Sampling, tokens
from seqjax.errors import UserError
from seqjax.ops.attention import causal_attention
from seqjax.ops.positions import alibi_slopes
from seqjax.ops.shared_attention import shared_attention
from tests import support
from tests.models import oracle

T = 23
CASES = [
    {},
    {"window": 5},
    {"scale": 1.5},
    {"slopes": alibi_slopes(4)},
    {"window": 5, "scale": 0.3, "slopes": alibi_slopes(4)},
]


def inputs(n_batch: int = 3, n_kv: int = 2):
    rng = np.random.default_rng(0)
    shapes = [(T, 4, 8), (T, n_kv, 8), (n_batch, T, n_kv, 6)]
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


@pytest.mark.parametrize("n_kv", support.slow_unless(lambda n: n == 2, [1, 2, 4]))
@pytest.mark.parametrize("options", CASES)
def test_one_softmax_is_attention_with_repeated_queries_and_keys(options, n_kv):
    q, k, v = inputs(n_kv=n_kv)
    v = jnp.pad(v, [(0, 0)] * 3 + [(0, 2)])  # causal_attention needs values as wide as keys

    def old(q, k, v):
        return causal_attention(*(jnp.broadcast_to(x, (3, *x.shape)) for x in (q, k)), v, **options)

    def new(q, k, v):
        return shared_attention(q, k, v, **options)

    np.testing.assert_allclose(jax.jit(new)(q, k, v), jax.jit(old)(q, k, v), rtol=1e-5, atol=1e-6)
    weight = jnp.cos(jnp.arange(3 * T * 4 * 8, dtype=jnp.float32)).reshape(3, T, 4, 8)
    losses = [lambda *x, f=f: jnp.sum(weight * f(*x)) for f in (new, old)]
    grads = [jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v) for loss in losses]
    for ours, theirs in zip(*grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_values_may_have_another_width():
    q, k, v = inputs()
    attend = jax.jit(shared_attention)
    wide = attend(q, k, jnp.pad(v, [(0, 0)] * 3 + [(0, 2)]))
    np.testing.assert_allclose(attend(q, k, v), wide[..., :6], rtol=1e-6)


def flops(model, n_batch: int) -> float:
    """Return XLA's FLOPs for one layer and a batch, before optimisation."""
    block = model.blocks["0"]
    x_BTD = jax.ShapeDtypeStruct((n_batch, model.max_len, model.config.dim), jnp.float32)
    lowered = jax.jit(lambda p, x: block.bind(p)(x, {}, layer=jnp.int32(0), dtype=jnp.float32)[0]).lower(
        block.shapes, x_BTD
    )
    return lowered.cost_analysis()["flops"]


def scores(jaxpr, seq_len: int) -> set[tuple[int, ...]]:
    """Return the shapes of all program values that are quadratic in time."""
    shapes = {v.aval.shape for e in jaxpr.eqns for v in e.outvars if v.aval.shape.count(seq_len) == 2}
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            shapes |= scores(inner, seq_len) if hasattr(inner, "eqns") else set()
    return shapes


def test_scores_are_made_once_for_the_whole_batch():
    """Loss and gradient hold H T^2 scores for 7 sequences.

    An eighth sequence adds no second QK^T.
    """
    length, n_heads = 41, 4
    model = support.tiny_model("transformer_pp", "const_qk", train__seq_len=length)
    tokens = jax.ShapeDtypeStruct((7, length + 1), jnp.int32)
    shapes = scores(jax.make_jaxpr(jax.grad(lambda p, t: model.loss(p, t)[0]))(model.shapes, tokens).jaxpr, length)
    sizes = {int(np.prod(shape)) for shape in shapes}
    assert max(sizes) == model.config.n_layers * n_heads * length**2, shapes  # the scan saves one per layer
    per_sequence = flops(model, 8) - flops(model, 7)
    full = support.tiny_model("transformer_pp", train__seq_len=length)
    projections = 2 * 2 * 32 * 32 * length  # q and k, replaced by a table
    scores_and_softmax = (flops(full, 8) - flops(full, 7)) - projections - per_sequence
    assert scores_and_softmax > 2 * 32 * length**2, "QK^T of a sequence, and its softmax, are gone"


@pytest.mark.parametrize("const", [pytest.param("k", marks=pytest.mark.slow), "qk"])
@pytest.mark.parametrize(
    "options",
    support.slow_unless(
        lambda options: not options,
        [{}, {"window": 5}, {"position": "alibi"}, {"kv_heads": 2}, {"temperature": 0.5}],
    ),
)
def test_tables_are_queries_and_keys(const, options):
    """Whole sequences match numpy; decoding matches whole sequences."""
    settings = {f"model__mixer__{key}": value for key, value in options.items()} | {"model__mixer__const": const}
    model = support.tiny_model("transformer_pp", **settings)
    weights, tokens = support.random_params(model), support.random_tokens((3, T))
    want = oracle.logits(model.config, weights, tokens)
    np.testing.assert_allclose(jax.jit(model.logits)(weights, tokens), want, rtol=2e-4, atol=2e-4)
    step = jax.jit(model.step)
    logits, cache = jax.jit(model.prefill)(weights, tokens[:, :7], model.init_cache(3, T))
    for t in range(7, T):
        np.testing.assert_allclose(logits, want[:, t - 1], rtol=2e-4, atol=2e-4)
        logits, cache = step(weights, tokens[:, t], jnp.asarray(t), cache)


# -------------------------------------------------------------------------------------------------------- length limits
TABLES = [
    ("transformer_pp", "const_k", T),
    ("transformer_pp", "const_qk", T),
    ("transformer", "full", T),
    ("transformer_pp", "full", 0),
    ("rwkv7_shell", "full", 0),
    ("mamba1", "full", 0),
]


@pytest.mark.parametrize(("mixer", "variant", "longest"), TABLES)
def test_sequence_length_limit_of_tables(mixer, variant, longest):
    model = support.tiny_model(mixer, variant)
    assert model.longest == longest
    tokens = jax.ShapeDtypeStruct((1, T + 1), jnp.int32)
    if not longest:
        jax.eval_shape(model.logits, model.shapes, tokens)
        model.init_cache(1, T + 1)
        return
    for call in (lambda: jax.eval_shape(model.logits, model.shapes, tokens), lambda: model.init_cache(1, T + 1)):
        with pytest.raises(UserError, match=rf"{T + 1} tokens.*{T} positions.*seq_len"):
            call()


def test_generation_beyond_the_table_is_refused():
    model = support.tiny_model("transformer_pp", "const_qk")
    weights, prompt = support.random_params(model), support.random_tokens((1, 3))
    options = {"model": model, "key": jax.random.key(0), "sampling": Sampling(temperature=0.0)}
    assert len(list(tokens(weights, prompt, n_new=T - 3, **options))) == T - 3
    with pytest.raises(UserError, match=f"{T + 1} tokens"):
        next(tokens(weights, prompt, n_new=T - 2, **options))


def test_cudnn_with_a_shared_softmax_is_refused():
    with pytest.raises(UserError, match=r"implementation='cudnn'.*const='qk'.*'xla'"):
        support.tiny("transformer_pp", "const_qk", model__mixer__implementation="cudnn")
