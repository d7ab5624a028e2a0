"""Test lab.benchmarks.table3 with a model of size debug."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness import plot
from benchmarks.harness.configs import configured
from lab.benchmarks import table3
from seqjax.models import Model


@pytest.fixture(scope="module")
def model_and_params():
    model = Model(configured("top1_chunk", "debug", batch=0, seq_len=0).model, max_len=64)
    return model, jax.jit(model.init)(jax.random.key(0))


def test_paper_models_are_in_figure_7():
    assert set(table3.PAPER_TRAINING) < set(table3.FIGURE.MODELS)
    assert table3.PAPER_TRAINING[table3.FIGURE.REFERENCE] == 1


def test_models_option_accepts_labels_with_commas():
    args = table3.FLAGS.parse_args(["--models=RWKV-7 shell, full attention; Mamba-2"])
    assert args.models == ["RWKV-7 shell, full attention", "Mamba-2"]
    assert set(args.models) < set(table3.FIGURE.MODELS)


def test_prompt_and_steps_are_timed(model_and_params):
    row = table3.infer(*model_and_params, table3.Inference(prompt=33, new=16, sequences=4, timed=1, size="debug"))
    assert row["at_a_time"] == 4
    assert len(row["steps_ms"]) == table3.POSITIONS
    assert row["decode_tokens_per_s"] == pytest.approx(4e3 / row["step_ms"])
    assert row["new_tokens_per_s"] == pytest.approx(64 / (4 * row["prompt_s"] + 16e-3 * row["step_ms"]))


def test_inference_repeats_are_timed_and_drawn(model_and_params, tmp_path, monkeypatch):
    row = table3.infer(*model_and_params, table3.Inference(prompt=33, new=16, sequences=4, timed=4, size="debug"))
    assert len(row["new_tokens_runs"]) == table3.REPEATS
    assert min(row["new_tokens_runs"]) <= row["new_tokens_per_s"] * 1.5 and min(row["new_tokens_runs"]) > 0
    drawn = []
    monkeypatch.setattr(plot, "bars", lambda path, rows, **_: drawn.extend(rows))
    older = {"train_ratio": 2.0, "train_tokens_per_s": 20.0, "train_runs": [19.0, 20.0, 22.0]}
    older |= {"inference_ratio": 3.0, "new_tokens_per_s": 6.0}
    written = {"machine": {"device": "a test"}, "settings": {"size": "debug"}}
    newer = older | {"new_tokens_runs": [5.0, 6.0, 8.0]}
    table3.plot_report(written | {"results": {"older": older, "newer": newer}}, tmp_path / "x.png")
    assert [(bar.name, list(bar.runs)) for bar in drawn] == [
        ("older, training", [1.9, 2.0, 2.2]),
        ("older, inference", []),
        ("newer, training", [1.9, 2.0, 2.2]),
        ("newer, inference", [2.5, 3.0, 4.0]),
    ]


@pytest.mark.slow
def test_repeated_cache_continues_like_the_original(model_and_params):
    model, params = model_and_params
    tokens_BT = np.arange(40, dtype=np.int32)[None]
    logits_BO, one = jax.jit(model.prefill)(params, tokens_BT, model.init_cache(1, 64))
    token_B = jnp.argmax(logits_BO, -1)
    several = table3.repeated(one, model, 3, 64)
    step = jax.jit(model.step)
    single, _ = step(params, token_B, 40, one)
    together, _ = step(params, jnp.repeat(token_B, 3), 40, several)
    np.testing.assert_allclose(together, jnp.repeat(single, 3, 0), rtol=1e-5, atol=1e-5)
    assert table3.cache_bytes(model, 64) == sum(x.nbytes for x in jax.tree.leaves(one))


def test_ratios_are_relative_to_full_attention():
    reference = {"train_tokens_per_s": 10.0, "new_tokens_per_s": 4.0}
    row = table3.relative({"train_tokens_per_s": 25.0, "new_tokens_per_s": 2.0}, reference)
    assert (row["train_ratio"], row["inference_ratio"]) == (2.5, 0.5)
    assert "train_ratio" not in table3.relative({"error": "no memory"}, reference)
