"""Attention entropy: the layers that have it, and its place in a run's outputs.

test_against_numpy.py compares the values.
"""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax import mixers
from seqjax.commands import evaluate as evaluate_command
from seqjax.config import from_config_dict
from seqjax.data import open_corpus
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.models.entropy import mean_entropy, require_entropy
from seqjax.ops.attention import attention_entropy
from seqjax.training import evaluate, metrics
from seqjax.training.loop import train
from tests import support
from tests.models import oracle

B, T = 3, 23


def measure(model: Model, weights, tokens):
    return jax.jit(lambda w, t: mean_entropy(model, w, t))(weights, tokens)


def hybrid(**overrides) -> Model:
    config = importlib.import_module("configs.transformer_pp").get_config("debug")
    window = {**config.model.mixer.to_dict(), "heads": 4, "window": 3}
    full = {**window, "window": None, "temperature": 0.5}
    with config.ignore_type():
        config.model.mixer = (window, {"name": "top1_chunk", "heads": 2, "chunk_size": 4}, full)
        settings = {"model.dim": 32, "model.n_layers": 6, "model.vocab_size": 48, "train.seq_len": T}
        config.update_from_flattened_dict(settings | overrides)
    return Model(from_config_dict(config).model, max_len=T)


@pytest.mark.slow
def test_hybrid_entropy_has_the_softmax_layers_only():
    """A scan orders the results by pattern position: layers 0, 3, 2, 5 of six."""
    model = hybrid()
    weights, tokens = support.random_params(model), support.random_tokens((B, T))
    nats, relative = (x[[0, 2, 1, 3]] for x in oracle.attention_entropy(model.config, weights, tokens))
    for variant in (model, hybrid(**{"model.scan_layers": False}), hybrid(**{"model.remat": "full"})):
        nats_LB, relative_LB = measure(variant, weights, tokens)
        np.testing.assert_allclose(nats_LB, nats, rtol=1e-4)
        np.testing.assert_allclose(relative_LB, relative, rtol=1e-4)


def test_uniform_weights_have_maximum_entropy():
    model = support.tiny_model("transformer_pp")
    weights = support.random_params(model)
    weights["blocks"]["0"]["mixer"]["q"]["w"] *= 0
    nats_LB, relative_LB = measure(model, weights, support.random_tokens((B, T)))
    np.testing.assert_allclose(relative_LB, np.ones((2, B)), rtol=1e-6)
    np.testing.assert_allclose(nats_LB, np.full((2, B), np.log(np.arange(2, T + 1)).mean()), rtol=1e-6)


def intermediate_sizes(jaxpr) -> list[int]:
    """Return the sizes of all values that a program computes, including loops."""
    sizes = [v.aval.size for equation in jaxpr.eqns for v in equation.outvars]
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            sizes += intermediate_sizes(inner) if hasattr(inner, "eqns") else []
    return sizes


def test_entropy_never_materializes_all_scores():
    x = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(attention_entropy)(x, x).jaxpr
    assert max(intermediate_sizes(jaxpr)) <= 2 * 4096 * 128


WITH = ("transformer", "transformer_pp", "fox", "mla", "post_norm_attention")
WITHOUT = [name for name in mixers.names() if name not in WITH]


@pytest.mark.parametrize("mixer", support.slow_unless(lambda mixer: mixer in support.REPRESENTATIVE, WITHOUT))
def test_mixers_without_softmax_are_refused(mixer):
    """The shell's first variant is Top-1 Chunk, whose weights are not a softmax over the past."""
    model = support.tiny_model(mixer, dict(support.FIRST)[mixer])
    with pytest.raises(UserError, match=rf"{mixer}: .*--entropy.*config\.eval\.entropy_tokens"):
        require_entropy(model)


def test_single_token_is_refused():
    with pytest.raises(UserError, match=r"config\.train\.seq_len"):
        require_entropy(support.tiny_model("transformer_pp", train__seq_len=1))


# -------------------------------------------------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def run(blocks_dir, tmp_path_factory) -> Path:
    """Train the config `ablations.temperature` with entropy on eight devices; return the workdir."""
    workdir = tmp_path_factory.mktemp("entropy") / "run"
    overrides = {"train__steps": 8, "checkpoint__every": 0, "eval__entropy_tokens": 10 * support.SEQ_LEN}
    assert train(support.run_config(blocks_dir, "ablations.temperature", **overrides), workdir) is True
    return workdir


def test_final_evaluation_and_report_have_the_entropy(run):
    *before, last = [r for r in metrics.read(run) if "eval/c4/loss" in r]
    assert before
    assert not any("entropy" in key for r in before for key in r)
    text = (run / "report.md").read_text()
    assert "| domain | loss | perplexity | bits per byte | entropy | of ln(i+1) |  |" in text
    for domain in ("c4", "arxiv"):
        nats, relative = last[f"eval/{domain}/entropy"], last[f"eval/{domain}/entropy_relative"]
        assert 0 < nats < np.log(support.SEQ_LEN)
        assert 0 < relative < 1
        assert f"| {nats:.4f} | {relative:.4f} |" in text


def test_run_entropy_is_the_mean_over_blocks(run):
    """Ten blocks on eight devices with a padded second batch equal one device without padding."""
    last = metrics.read(run)[-1]
    config, model, weights, _, _ = evaluate.restore(run)
    corpus = open_corpus(config.data, seq_len=support.SEQ_LEN, vocab_size=config.model.vocab_size)
    rows = jnp.asarray(corpus.eval_blocks("arxiv", count=10).tokens.astype(np.int32))
    nats_LB, relative_LB = measure(model, jax.device_get(weights), rows[:, :-1])
    assert nats_LB.shape == (2, 10)
    assert last["eval/arxiv/entropy"] == pytest.approx(float(nats_LB.mean()), rel=1e-5)
    assert last["eval/arxiv/entropy_relative"] == pytest.approx(float(relative_LB.mean()), rel=1e-5)


def test_evaluate_reports_entropy_only_with_the_flag(run, capsys):
    last = metrics.read(run)[-1]
    evaluate_command.main([f"--workdir={run}", "--entropy"])
    shown = capsys.readouterr().out
    written = json.loads((run / "evaluation.json").read_text())
    for field in ("loss", "entropy", "entropy_relative"):
        assert written[field]["github"] == pytest.approx(last[f"eval/github/{field}"], rel=1e-6)
    assert f"entropy {written['entropy']['github']:.4f}, " in shown
    evaluate_command.main([f"--workdir={run}"])
    assert "of ln(i + 1)" not in capsys.readouterr().out
    assert set(json.loads((run / "evaluation.json").read_text())) == {
        "step",
        "manifest",
        "loss",
        "bits_per_byte",
        "mean",
    }


def test_impossible_entropy_is_refused_before_training(blocks_dir, tmp_path):
    config = support.run_config(blocks_dir, "top1_chunk", eval__entropy_tokens=64, train__steps=2)
    with pytest.raises(UserError, match=r"top1_chunk: .*config\.eval\.entropy_tokens"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
