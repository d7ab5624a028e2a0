"""`python -m seqjax.evaluate` on a finished run: blocks, domains, their order, and values."""

import errno
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.commands import evaluate as evaluate_command
from seqjax.data import open_corpus
from seqjax.errors import UserError
from seqjax.models.entropy import mean_entropy
from seqjax.training import evaluate, metrics
from tests import support
from tests.end_to_end.conftest import Run
from tests.end_to_end.reference import mean_loss

DOMAINS = ["commoncrawl", "c4", "arxiv", "github", "stackexchange"]


class Blocks:
    """The newest checkpoint of a run and the evaluation blocks of every domain, read without the package's batches."""

    def __init__(self, run: Run):
        config, self.model, params, _, _ = evaluate.restore(run.workdir)
        self.params, self.seed = jax.device_get(params), config.eval.seed
        sizes = {"seq_len": support.SEQ_LEN, "vocab_size": config.model.vocab_size}
        self.corpus = open_corpus(config.data, **sizes, test_sets=config.eval.path)
        self._loss = jax.jit(lambda p, x: mean_loss(self.model.logits(p, x[:, :-1]), x[:, 1:]))
        self._entropy = jax.jit(lambda params, tokens_BT: mean_entropy(self.model, params, tokens_BT))

    def tokens(self, domain: str, count: int) -> jax.Array:
        rows = self.corpus.eval_blocks(domain, count=count, seed=self.seed).tokens
        assert len(rows) == count
        return jnp.asarray(rows.astype(np.int32))

    def losses(self, count: int) -> dict[str, float]:
        domains = [*DOMAINS, *(d for d in self.corpus.eval_domains if d not in DOMAINS)]
        return {domain: float(self._loss(self.params, self.tokens(domain, count))) for domain in domains}

    def entropies(self, count: int) -> dict[str, float]:
        return {
            d: float(self._entropy(self.params, self.tokens(d, count)[:, :-1])[0].mean())
            for d in self.corpus.eval_domains
        }


@pytest.fixture(scope="module")
def blocks(run: Run) -> Blocks:
    return Blocks(run)


@pytest.fixture(scope="module")
def rough_blocks(rough: Run) -> Blocks:
    return Blocks(rough)


@pytest.mark.slow
def test_a_read_only_workdir_is_evaluated(run: Run, capsys, monkeypatch):
    def read_only(path, value):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(evaluate_command, "write_json", read_only)
    evaluate_command.main([f"--workdir={run.workdir}", "--tokens=64"])
    out, err = capsys.readouterr()
    assert "domains count" in out
    assert re.search(rf"{run.workdir}/evaluation\.json .*not .*\(Read-only", err)


def test_negative_tokens_are_refused(run: Run):
    with pytest.raises(UserError, match=r"^--tokens .*-5"):
        evaluate_command.main([f"--workdir={run.workdir}", "--tokens=-5"])


def test_data_other_than_the_run_data_is_named(run: Run, capsys):
    path = run.workdir / "run.json"
    before = path.read_text()
    recorded = json.loads(before)["manifest"]
    written = command(run, "--tokens=64")
    out, err = capsys.readouterr()
    assert written["manifest"] == recorded and f"data {recorded[:16]}" in out and not err
    path.write_text(before.replace(recorded, "0123456789abcdef" * 4))
    try:
        assert command(run, "--tokens=64")["manifest"] == recorded
    finally:
        path.write_text(before)
    said = capsys.readouterr().err
    assert f"manifest {recorded[:16]}" in said and "0123456789abcdef" in said


def command(run: Run, *options: str) -> dict:
    evaluate_command.main([f"--workdir={run.workdir}", *options])
    return json.loads((run.workdir / "evaluation.json").read_text())


def smallest_difference(losses: dict[str, float]) -> float:
    """Return the smallest difference between two values."""
    return float(np.min(np.diff(np.sort(list(losses.values())))))


def test_every_domain_has_its_loss_in_the_order_of_the_regime(run: Run, blocks: Blocks, capsys):
    """Checked in the run's last row, in `evaluation.json` and on the terminal; test sets come last."""
    want = blocks.losses(11)
    assert smallest_difference(want) > 1e-3, "domains that are alike would hide a confusion"
    of_another_seed = blocks.corpus.eval_blocks("arxiv", count=11, seed=0).tokens
    assert (of_another_seed != np.asarray(blocks.tokens("arxiv", 11))).any(), "config.eval.seed makes no difference"
    last = metrics.read(run.workdir)[-1]
    assert len(want) == 5 + 7
    assert {d: last[f"eval/{d}/loss"] for d in want} == pytest.approx(want, rel=1e-5)
    assert last["eval_mean/out_of_domain/equal"] == pytest.approx(np.mean([want[d] for d in DOMAINS[2:]]), rel=1e-5)
    written = command(run)
    assert written["loss"] == pytest.approx(want, rel=1e-5)
    assert list(written["loss"]) == list(want)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith("  mean ")]
    assert [words[0] for words in shown] == list(want)
    assert [float(words[1]) for words in shown] == pytest.approx(list(want.values()), abs=1e-4)
    assert [float(words[2]) for words in shown] == pytest.approx(list(written["bits_per_byte"].values()), abs=1e-4)
    assert {" ".join(words[3:6]) for words in shown} == {"bits per byte"}
    assert [" ".join(words[6:]) for words in shown] == ["in domain"] * 2 + ["out of domain"] * 3 + ["test set"] * 7


def test_tokens_option_sets_the_evaluation_size(rough: Run, rough_blocks: Blocks):
    few, many = rough_blocks.losses(3), rough_blocks.losses(11)
    assert all(abs(few[d] - many[d]) > 1e-3 for d in few), "three blocks must not look like eleven"
    written = command(rough, f"--tokens={3 * support.SEQ_LEN}", "--entropy")
    assert written["step"] == 7
    assert written["loss"] == pytest.approx(few, rel=1e-5)
    assert written["entropy"] == pytest.approx(rough_blocks.entropies(3), rel=1e-5)
    assert written["entropy"] != pytest.approx(rough_blocks.entropies(11), rel=1e-4)


def test_test_sets_replace_the_run_data(run: Run, blocks: Blocks, tmp_path, capsys):
    """Evaluate every domain in a directory of blocks, here a renamed copy of the run's data."""
    config = evaluate.restore(run.workdir)[0]
    copy = shutil.copytree(config.data.path, tmp_path / "again")
    before = (run.workdir / "evaluation.json").read_bytes()
    evaluate_command.main([f"--workdir={run.workdir}", f"--data={copy}"])
    assert (run.workdir / "evaluation.json").read_bytes() == before
    written = json.loads((run.workdir / "test_sets.json").read_text())
    assert len(written["loss"]) == 7
    assert {d: written["loss"][f"again.{d}"] for d in DOMAINS[2:]} == pytest.approx(
        {d: loss for d, loss in blocks.losses(11).items() if d in DOMAINS[2:]}, rel=1e-5
    )
    assert not written["mean"]
    assert "again.arxiv" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^--data: .*no directory nowhere; "):
        evaluate_command.main([f"--workdir={run.workdir}", "--data=nowhere"])


def test_the_entropy_uses_the_tokens_in_the_config(run: Run, blocks: Blocks):
    last, want = metrics.read(run.workdir)[-1], blocks.entropies(5)
    assert {d: last[f"eval/{d}/entropy"] for d in want} == pytest.approx(want, rel=1e-5)
    assert blocks.entropies(11) != pytest.approx(want, rel=1e-4)


def test_a_run_with_a_larger_mesh_is_evaluated_on_the_available_devices(run: Run, tmp_path):
    """A config for a pod need not fit a laptop."""
    workdir = shutil.copytree(run.workdir, tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config["mesh"] = {"data": 64, "fsdp": 4, "tensor": 1}
    (workdir / "config.json").write_text(json.dumps(config))
    params, there = (evaluate.restore(path)[2] for path in (workdir, run.workdir))
    assert support.digest(jax.device_get(params)) == support.digest(jax.device_get(there))
