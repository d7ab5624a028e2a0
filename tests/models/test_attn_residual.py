"""Attention residuals: a public model, the mean of all outputs, the contract of a block, refusals.

test_against_numpy.py compares their equations in other models.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax import testing
from seqjax.errors import UserError
from seqjax.models import flops
from tests import support
from tests.mixers.test_golden_ssm import close, golden, tree

CASES = {
    "attention": ("transformer_pp", {"model__attn_residual": 3, "model__n_layers": 4}),
    "each": ("gated_deltanet", {"model__attn_residual": 1, "model__canon": "AC", "model__token_shift": True}),
    "no_mlp": ("mamba2", {"model__attn_residual": 2, "model__n_layers": 5}),
}
QUICK = {"attention": ("step",)}


@functools.cache
def case_of(name):
    mixer, settings = CASES[name]
    small = {"model__mixer__state": 8, "model__mixer__head_dim": 16} if mixer == "mamba2" else {}
    return testing.Case(support.tiny_model(mixer, **settings, **small))


@pytest.mark.parametrize("block_size", support.slow_unless(lambda size: size == 2, [1, 2, 4]))
def test_model_matches_the_reference(block_size):
    """Compare hidden states and all gradients of flash-linear-attention's Transformer with three layers."""
    prefix = f"{block_size}/"
    arrays = {key.removeprefix(prefix): x for key, x in golden("attn_residual").items() if key.startswith(prefix)}
    settings = {"dim": 8, "n_layers": 3, "vocab_size": 24, "mlp__dim": 12, "mlp__kind": "swiglu", "mixer__heads": 2}
    settings |= {"mixer__position": "none", "attn_residual": block_size}
    model = support.tiny_model("transformer_pp", **{f"model__{key}": value for key, value in settings.items()})
    params, tokens = tree(arrays, "p."), jnp.asarray(arrays["tokens"], jnp.int32)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, model.shapes)

    @jax.jit
    def run(params):
        hidden = model.hidden(params, tokens)
        return jnp.sum(hidden * arrays["weight"]), hidden

    (_, hidden), grads = jax.value_and_grad(run, has_aux=True)(params)
    close(hidden, arrays["hidden"])
    close(grads, tree(arrays, "g."), 5e-5)


def test_blocks_of_one_without_queries_read_the_mean_of_all_outputs():
    """The sources of the last mix are the embeddings and the outputs of all sub-layers."""
    model = support.tiny_model("transformer_pp", model__attn_residual=1)
    params, tokens = support.random_params(model), support.random_tokens((2, 7))
    is_query = lambda path: path[-1].key == "query_D"  # noqa: E731
    params = jax.tree_util.tree_map_with_path(lambda path, x: jnp.zeros_like(x) if is_query(path) else x, params)

    @jax.jit
    def both(params):
        x_BTD = params["embed"][tokens]
        outputs = [x_BTD]
        for layer in range(2):
            block = model.blocks["0"].bind(jax.tree.map(lambda p: p[layer], params["blocks"]["0"]))  # noqa: B023
            for norm, sublayer in ((block.norm1, block.mixer), (block.norm2, block.mlp)):
                outputs.append(sublayer(norm(sum(outputs) / len(outputs))))
        return model.hidden(params, tokens), model.embedder.bind(
            {key: x for key, x in params.items() if key != "blocks"}
        ).norm(sum(outputs) / len(outputs))

    got, want = both(params)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("name", "check"),
    support.slow_unless(
        lambda name, check: check in QUICK.get(name, ()),
        [(name, check) for name in CASES for check in testing.CHECKS if check not in ("chunk_size", "flops")],
    ),
)
def test_contract(name, check):
    testing.CHECKS[check](case_of(name))


def test_parameters_by_hand():
    """A query and a gain per sub-layer, and for the last mix."""
    for name, sublayers in (("attention", 8), ("no_mlp", 5)):
        model = case_of(name).model
        base = case_of(name).changed(attn_residual=None)
        assert flops.n_params(model) - flops.n_params(base) == 2 * 32 * (sublayers + 1)


@pytest.mark.parametrize("mixer", ["rwkv7", "rwkv5"])
def test_mixers_with_another_block_are_refused(mixer):
    with pytest.raises(UserError, match=rf"config\.model\.attn_residual=4 .*{mixer}"):
        support.tiny(mixer, model__attn_residual=4)
