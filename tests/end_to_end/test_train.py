"""One complete run in this process, on eight devices, and every command on its workdir."""

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.commands import evaluate as evaluate_command
from seqjax.commands import generate
from seqjax.data import open_corpus
from seqjax.decoding import Sampling, tokens
from seqjax.training import evaluate, metrics, token_classes
from seqjax.training import workdir as workdirs
from seqjax.training.loop import train
from tests import support
from tests.end_to_end.greedy import greedy

DOMAINS = ("commoncrawl", "c4", "arxiv", "github", "stackexchange")  # in domain first


@pytest.fixture(scope="module")
def run(blocks_dir, tmp_path_factory):
    """Return a finished run's workdir and its config; it evaluates every 6.5 steps of 256 tokens."""
    workdir = tmp_path_factory.mktemp("run") / "limited"
    config = support.run_config(
        blocks_dir, train__steps=30, eval__every=6 * 256 + 128, log__tensorboard=True, log__sample_tokens=16
    )
    assert train(config, workdir) is True
    return workdir, config


def test_files_of_a_workdir(run):
    workdir, config = run
    files = {"config.json", "run.json", "metrics.jsonl", "report.md", "report.png"}
    assert {p.name for p in workdir.iterdir()} == files | {"checkpoints", "eval_losses", "tensorboard"}
    assert not config.eval.classes and token_classes.read_classes(workdir) is None
    assert workdirs.load_config(workdir) == config
    assert support.checkpoint_steps(workdir) == [25, 30]  # `keep` is 2
    metadata = json.loads((workdir / "run.json").read_text())
    assert metadata["versions"]["jax"] == jax.__version__
    assert metadata["devices"] == 8
    assert metadata["backends"]["top1_chunk_attention"] == "xla"
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|", metadata["commit"])
    assert any(p.stat().st_size > 500 for p in (workdir / "tensorboard").iterdir())


def test_metrics_hold_pairs_of_losses(run):
    rows = metrics.read(run[0])
    steps = [r for r in rows if "tokens_per_s" in r]
    assert [r["tokens"] for r in steps] == [256 * s for s in range(1, 31)]
    assert all(r["tokens_per_s"] > 0 for r in steps)
    assert steps[-1]["mfu"] is None, "the peak of a CPU is not known"
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(steps))
    pairs = [r for r in rows if "eval/c4/loss" in r]
    assert [r["step"] for r in pairs] == [7, 13, 20, 26, 30], "after the steps that reach 1664, 3328, 4992, 6656 tokens"
    for r in pairs:
        fields = [f"eval/{d}/{field}" for field in ("loss", "bits_per_byte") for d in DOMAINS]
        assert [k for k in r if k.startswith("eval/")] == fields
        assert r["tokens"] == 256 * r["step"]


def test_the_report_names_every_domain_and_the_commands(run):
    workdir, config = run
    text = (workdir / "report.md").read_text()
    last = [r for r in metrics.read(workdir) if "eval/c4/loss" in r][-1]
    for domain in DOMAINS:
        line = next(line for line in text.splitlines() if line.startswith(f"| {domain} |"))
        assert f"{last[f'eval/{domain}/loss']:.4f}" in line
        assert ("out of domain" in line) == (domain not in ("commoncrawl", "c4"))
    assert "| byte bigram |" in text
    assert f"--workdir={workdir}" in text
    assert "seqjax train --config=transformer_pp:debug,limited" in text
    assert "A sample" in text
    assert (workdir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert config.name in text


# ----------------------------------------------------------------------------------------- evaluate and generate
def test_evaluate_repeats_the_last_evaluation(run, capsys):
    workdir = run[0]
    evaluate_command.main([f"--workdir={workdir}"])
    shown = capsys.readouterr().out
    written = json.loads((workdir / "evaluation.json").read_text())
    last = [r for r in metrics.read(workdir) if "eval/c4/loss" in r][-1]
    assert written["step"] == 30
    for domain in DOMAINS:
        assert written["loss"][domain] == pytest.approx(last[f"eval/{domain}/loss"], rel=1e-6)
        assert domain in shown
    (workdir / "evaluation.json").unlink()


def test_evaluation_is_the_mean_over_all_tokens(run):
    """Compared with the logits of each block; 10 blocks in batches of 8, so the second batch has padding rows."""
    workdir, config = run
    _, model, weights, _, mesh = evaluate.restore(workdir)
    corpus = open_corpus(config.data, seq_len=support.SEQ_LEN, vocab_size=config.model.vocab_size)
    with jax.set_mesh(mesh):
        losses = evaluate.Evaluation(model, corpus, config, mesh=mesh).losses(weights)
        domains = evaluate.load_domains(corpus, config, mesh=mesh)
        assert [w.sum() for w in domains["arxiv"].weights] == [8, 2]
        rows = jnp.asarray(corpus.eval_blocks("arxiv", count=10).tokens.astype(np.int32))
        p = jax.nn.log_softmax(jax.jit(model.logits)(jax.device_get(weights), rows[:, :-1]))
    want = -jnp.take_along_axis(p, rows[:, 1:, None], axis=-1).mean((1, 2))
    np.testing.assert_allclose(losses["arxiv"], want, rtol=1e-5)


def test_greedy_generation_is_the_argmax_of_growing_prefixes(run, capsys):
    """Uses a trained run; test_commands.py checks every config after two steps."""
    want, margins = greedy(run[0], "qwerty ", 24)
    generate.main([f"--workdir={run[0]}", "--prompt=qwerty ", "--max_new_tokens=24", "--temperature=0"])
    assert capsys.readouterr().out == f"qwerty {want}\n"
    assert len(want) == 24, "choose another prompt: this one ends, or writes what is no character"
    assert min(margins) > 0


def test_generation_depends_only_on_its_seed(run):
    _, model, weights, _, _ = evaluate.restore(run[0])
    weights = jax.device_get(weights)
    prompt = jnp.full((2, 3), 100)

    def new(seed, **options):
        sampling = Sampling(**{"temperature": 1.0, **options})
        return np.stack(
            list(tokens(weights, prompt, jax.random.key(seed), model=model, n_new=40, sampling=sampling)), axis=1
        )

    assert (new(1) == new(1)).all()
    assert (new(1) != new(2)).any()
    assert (new(1)[0] != new(1)[1]).any(), "rows of a batch are drawn apart"
    assert (new(1, top_k=1) == new(3, temperature=0.0)).all()


# ---------------------------------------------------------------------------------------------------- other runs
def test_the_regime_decides_the_domains(blocks_dir, tmp_path):
    config = support.run_config(blocks_dir, train__steps=2, data__regime="mixed", eval__every=0, checkpoint__every=0)
    assert train(config, tmp_path / "mixed")
    rows = [r for r in metrics.read(tmp_path / "mixed") if "eval/c4/loss" in r]
    assert [r["step"] for r in rows] == [2]
    assert sum(k.startswith("eval/") and k.endswith("/loss") for k in rows[0]) == 7
    assert support.checkpoint_steps(tmp_path / "mixed") == [2]
    assert "out of domain" not in (tmp_path / "mixed" / "report.md").read_text()


def test_an_evaluation_interval_below_one_step_is_reported(blocks_dir, tmp_path, capsys):
    config = support.run_config(blocks_dir, train__steps=1, eval__every=10, checkpoint__every=0)
    n_tokens = config.train.batch_size * config.train.seq_len
    assert train(config, tmp_path / "run")
    told = f"config.eval.every=10 counts tokens, and a step has {n_tokens:,}."
    assert told in capsys.readouterr().err


def test_the_profiler_window_is_written(blocks_dir, tmp_path):
    config = support.run_config(
        blocks_dir, "transformer_pp", train__steps=4, log__profile_start=2, log__profile_steps=50, eval__every=0
    )
    assert train(config, tmp_path / "run")
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb")), "a window longer than the run ends with it"


@pytest.mark.slow
@pytest.mark.parametrize("optimised", [False, True])
def test_the_default_command_on_the_builtin_corpus(optimised, corpus_cache, tmp_path):
    """A new user's first command at debug size: real text, no download, no workdir option."""
    args = support.command(tmp_path, tmp_path)[:3]
    config = f"--config={support.ROOT}/configs/top1_chunk.py:debug"
    extra = [f"--config.data.cache_dir={corpus_cache}", "--config.train.steps=6", "--config.log.sample_tokens=8"]
    environment = support.environment(optimised=optimised) | {"PYTHONPATH": str(support.ROOT)}
    result = support.run([*args, config, *extra], cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    (workdir,) = (tmp_path / "runs").iterdir()
    assert workdir.name.startswith("top1_chunk-debug-")
    assert "not SlimPajama" in " ".join(result.stderr.split())
    assert (workdir / "report.md").exists()
    assert json.loads((workdir / "config.json").read_text())["train"]["steps"] == 6
