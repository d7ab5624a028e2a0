"""Bits per byte exclude the losses of tokens without bytes (BOS and EOS)."""

import math

import jax
import numpy as np
import pytest

from seqjax.config import Config
from seqjax.data import Corpus, EvalBlocks
from seqjax.data.corpus import block_bytes
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.models import Model
from seqjax.sharding import make_mesh
from seqjax.training.evaluate import Evaluation
from tests import support

LETTERS, T, N = 21, 32, 13  # bytes of a document, tokens of a block, blocks
TOKENIZER = ByteTokenizer()


class Documents(Corpus):
    """A corpus of consecutive documents with `LETTERS` letters each."""

    def __init__(self):
        super().__init__(
            name="documents",
            tokenizer=TOKENIZER,
            seq_len=T,
            train_domains=("c4",),
            eval_domains=("c4",),
            weights={"c4": 1.0},
            manifest_hash="",
            natural_shares={"c4": 1.0},
        )

    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        rng = np.random.default_rng(0)
        documents = [[TOKENIZER.bos, *rng.integers(97, 123, LETTERS), TOKENIZER.eos] for _ in range(N * T)]
        tokens = np.concatenate(documents)[: N * (T + 1)].reshape(N, T + 1).astype(np.uint16)
        return EvalBlocks(tokens, np.arange(N), np.arange(N), block_bytes(tokens, self.tokenizer))

    def train_iterator(self, **_):
        raise NotImplementedError

    def train_sample(self, domain: str, *, count: int):
        raise NotImplementedError


@pytest.fixture(scope="module")
def config() -> Config:
    """Return a config with three sequences per device batch, so the last batch is padded."""
    return support.tiny("transformer_pp", model__vocab_size=TOKENIZER.vocab_size, train__seq_len=T, eval__batch_size=3)


def measure_documents(config: Config, params, **options):
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        evaluation = Evaluation(Model(config.model, max_len=T), Documents(), config, mesh=mesh, **options)
        return evaluation.measure(params)


def test_uniform_model_has_log_vocabulary_loss(config):
    zeros = jax.tree.map(np.zeros_like, support.random_params(Model(config.model, max_len=T)))
    losses, row = measure_documents(config, zeros)
    assert row["eval/c4/bits_per_byte"] == pytest.approx(math.log2(258), rel=1e-6)
    assert row["eval/c4/loss"] == pytest.approx(math.log(258), rel=1e-6)
    np.testing.assert_allclose(losses["c4"], math.log(258), rtol=1e-6)
    # Rules 1 counted 23 losses per 21 bytes, up to cut documents at block borders.
    losses_rules_1, row_rules_1 = measure_documents(config, zeros, rules=1)
    assert row_rules_1["eval/c4/bits_per_byte"] == pytest.approx(math.log2(258) * 23 / 21, rel=0.02)
    np.testing.assert_array_equal(losses_rules_1["c4"], losses["c4"])


def test_bits_per_byte_count_only_tokens_with_bytes(config):
    model = Model(config.model, max_len=T)
    params, tokens = support.random_params(model), Documents().eval_blocks("c4", count=N).tokens.astype(np.int32)
    losses, row = measure_documents(config, params)
    nats_NT = np.asarray(jax.jit(model.token_losses)(params, tokens), np.float64)
    has_bytes = tokens[:, 1:] < 256
    assert not has_bytes.all() and nats_NT[has_bytes].mean() != pytest.approx(nats_NT.mean(), rel=1e-3)
    assert row["eval/c4/bits_per_byte"] == pytest.approx(nats_NT[has_bytes].mean() / math.log(2), rel=1e-5)
    np.testing.assert_allclose(losses["c4"], nats_NT.mean(1), rtol=1e-5)
    assert row["eval/c4/loss"] == pytest.approx(nats_NT.mean(), rel=1e-5)
