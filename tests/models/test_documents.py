"""Packed documents in a model (`config.data.reset`): numbers, parts of the block, forms, meshes, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax import mixers, testing
from seqjax.config import Config, from_config_dict, presets
from seqjax.data.corpora import document_ids
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers.gated_deltanet import GatedDeltaNet
from seqjax.models import Model
from seqjax.models.entropy import mean_entropy
from seqjax.nn import Linear
from seqjax.ops.documents import document_numbers
from tests import support
from tests.models.test_sequence_split import assert_equals_one_device, mesh_of

T = 24
BOS, EOS = 1, 2


def packed(model: Model) -> Model:
    """Return the model with documents that begin at BOS after EOS."""
    return Model(model.config, max_len=model.max_len, documents=(BOS, EOS))


def tokens_with(*cuts: int, shape: tuple[int, int] = (2, T)) -> jax.Array:
    """Return tokens from 3 on, with the first BOS at each cut after an EOS."""
    tokens = np.random.default_rng(0).integers(3, 48, shape, dtype=np.int32)
    for cut in cuts:
        tokens[:, cut - 1 : cut + 1] = EOS, BOS
    return jnp.asarray(tokens)


@pytest.mark.parametrize(
    ("ids", "tokens", "numbers"),
    [
        ((BOS, EOS), [7, 2, 1, 8, 2, 1, 2, 1], [0, 0, 1, 1, 1, 2, 2, 3]),
        ((BOS, EOS), [1, 7, 2, 8, 1, 9], [0, 0, 0, 0, 0, 0]),  # only together
        ((2, 2), [7, 2, 2, 8, 9, 2, 2, 8], [0, 0, 1, 1, 1, 1, 2, 2]),  # one id for both
        ((2, 2), [2, 8, 2, 2], [0, 0, 0, 1]),
    ],
)
def test_a_document_begins_at_bos_after_eos(ids, tokens, numbers):
    got = document_numbers(jnp.asarray([tokens], jnp.int32), *ids)
    np.testing.assert_array_equal(got, [numbers])


# Parts outside the mixer that look back: Canon convolutions, the block's token shift, learned positions.
PARTS = {
    "block": ("gated_deltanet", {"model__canon": "ACD", "model__token_shift": True}),
    "attention": ("transformer_pp", {"model__learned_positions": True, "model__mixer__conv": True}),
    "sources": ("transformer_pp", {"model__attn_residual": 2}),
}


@pytest.mark.parametrize("name", support.slow_unless(lambda name: name == "attention", PARTS))
def test_parts_outside_the_mixer_keep_documents_apart(name):
    mixer, settings = PARTS[name]
    testing.check_reset(testing.Case(support.tiny_model(mixer, **settings)))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["rwkv7", "gated_deltanet"])
def test_unrolled_and_rematerialised_layers_give_equal_gradients(mixer):
    model, tokens = support.tiny_model(mixer), tokens_with(9, 16, shape=(2, T + 1))
    params = support.random_params(model)
    want = testing.loss_and_grads(packed(model), params, tokens)
    for settings in ({"scan_layers": False}, {"remat": "full"}):
        changed = testing.Case(model).changed(**settings)
        testing._assert_same(testing.loss_and_grads(packed(changed), params, tokens), want, str(settings))


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() != 8, reason="needs eight devices (XLA_FLAGS is set)")
@pytest.mark.parametrize("split", ["2", "2x2x2"])
@pytest.mark.parametrize("mixer", ["gated_deltanet", "rwkv6", "mamba2", "transformer_pp", "top1_chunk"])
def test_sequences_split_over_devices_give_equal_gradients(mixer, split):
    model = packed(support.tiny_model(mixer, dict(support.FIRST)[mixer], train__seq_len=T))
    tokens = tokens_with(9, 12, shape=(2, T + 1))
    params = support.random_params(model)
    want = testing.loss_and_grads(model, params, tokens)
    assert_equals_one_device(model, params, tokens, *want, mesh_of(split), tol=5e-5)


@pytest.mark.slow
def test_losses_of_a_document_equal_its_own_sequence():
    model = support.tiny_model("gated_deltanet")
    params, tokens = support.random_params(model), tokens_with(8, shape=(2, T + 1))
    got = jax.jit(packed(model).token_losses)(params, tokens)[:, 8:]
    np.testing.assert_allclose(got, jax.jit(model.token_losses)(params, tokens[:, 8:]), rtol=2e-3, atol=2e-4)
    assert (np.abs(got - jax.jit(model.token_losses)(params, tokens)[:, 8:]) > 1e-2).any()


class OneDocument(base.RecurrentMixer):
    """Running sums over all earlier tokens."""

    def __init__(self, dim, *, rngs):
        self.out = Linear(dim, dim, axes=("mlp", "embed"), rngs=rngs)

    def prefill(self, x_BTD, cache):
        """Continue the sums."""
        y_BTD = cache[:, None] + jnp.cumsum(x_BTD, axis=1)
        return self.out(y_BTD), y_BTD[:, -1]

    def init_cache(self, batch, max_len, dtype):
        """Return the sum of no tokens."""
        del max_len
        return jnp.zeros((batch, 32), dtype)


def test_support_is_not_inherited():
    class Mine(GatedDeltaNet):
        """A mixer that may mix tokens elsewhere."""

    assert GatedDeltaNet.resets and not Mine.resets and not OneDocument.resets


def config_with(mixer: str, **settings) -> Config:
    config = presets.get_config("debug", name="check", mixer={"name": mixer}, settings=settings)
    return from_config_dict(config)


def test_mixers_and_blocks_without_support_are_named(monkeypatch):
    with pytest.raises(UserError, match=r"config\.data\.reset=True: the mixer mamba1 cannot restart.*gated_deltanet"):
        config_with("mamba1", **{"data.reset": True})
    config_with("mamba1", **{"data.reset": False})

    class Block(base.Block):
        pass

    monkeypatch.setattr(GatedDeltaNet, "block", Block)
    with pytest.raises(UserError, match="Block, the block of gated_deltanet, cannot restart"):
        config_with("gated_deltanet", **{"data.reset": True})


def test_a_violation_is_reported():
    """A mixer that declares support and ignores `segments`."""

    @mixers.register("ignores_documents")
    class Ignores(OneDocument):
        """A wrong declaration."""

        resets = True

        def prefill(self, x_BTD, cache, segments=None):
            """Ignore the documents."""
            del segments
            return super().prefill(x_BTD, cache)

    skip = set(testing.CHECKS) - {"reset"}
    with pytest.raises(AssertionError, match=r"reset: documents of 9 and 14 tokens: other tokens in the first move"):
        testing.check_mixer(Ignores, skip=skip)


def test_entropy_is_refused():
    model = packed(support.tiny_model("transformer_pp"))
    with pytest.raises(UserError, match=r"config\.data\.reset=True does not read"):
        mean_entropy(model, model.shapes, jnp.zeros((1, T), jnp.int32))


def test_shared_scores_are_refused():
    model = packed(support.tiny_model("transformer_pp", "const_qk"))
    with pytest.raises(UserError, match="const='qk' computes one softmax for all sequences"):
        jax.eval_shape(model.hidden, model.shapes, jax.ShapeDtypeStruct((2, 8), jnp.int32))


def test_ids_come_from_the_tokenizer():
    data = config_with("gated_deltanet", **{"data.reset": True}).data
    assert document_ids(data) == (ByteTokenizer.bos, ByteTokenizer.eos)
    assert document_ids(config_with("gated_deltanet").data) is None
