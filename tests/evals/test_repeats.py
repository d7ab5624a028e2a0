"""`seqjax repeats`: samples, scored tokens, and the command."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.data import open_corpus
from seqjax.errors import UserError
from seqjax.evals import repeats
from seqjax.evals.repeats import CUE, PASSAGE
from seqjax.models import Model
from seqjax.pretrained import Pretrained
from seqjax.sharding import make_mesh
from seqjax.training.loop import train
from tests import support


@pytest.mark.parametrize("length", [128, 200, 2048])
def test_distances_leave_room_for_both_passages(length):
    distances = repeats.distances(length)
    assert distances == sorted(set(distances))
    assert distances[0] == PASSAGE  # adjacent passages
    assert distances[-1] + PASSAGE == length + 1  # the first passage at the start


def test_sample_has_passage_at_distance():
    text, passage = np.arange(301), np.arange(1000, 1000 + PASSAGE)
    for distance in repeats.distances(300):
        sequence = repeats.sample(text, passage, distance)
        starts = np.flatnonzero(sequence == 1000)
        np.testing.assert_array_equal(starts, [301 - PASSAGE - distance, 301 - PASSAGE])
        np.testing.assert_array_equal(sequence[sequence < 1000], text[sequence < 1000])
    baseline = repeats.sample(text, passage, None)
    assert (baseline >= 1000).sum() == PASSAGE and (text < 1000).all()


@pytest.fixture
def corpus(blocks_dir):
    return open_corpus(support.run_config(blocks_dir).data, seq_len=support.SEQ_LEN, vocab_size=260)


def test_passages_come_from_other_blocks(monkeypatch, corpus):
    monkeypatch.setattr(repeats, "PASSAGE", 10)
    pairs = repeats.drawn(corpus, "arxiv", length=2 * support.SEQ_LEN, n=2, seed=0)
    assert [len(text) for text, _ in pairs] == [2 * support.SEQ_LEN + 1] * 2
    repeated = repeats.drawn(corpus, "arxiv", length=2 * support.SEQ_LEN, n=2, seed=0)
    for (text, passage), (same_text, same_passage) in zip(pairs, repeated, strict=True):
        np.testing.assert_array_equal(text, same_text)
        np.testing.assert_array_equal(passage, same_passage)
        windows = np.lib.stride_tricks.sliding_window_view(text, 10)
        assert not (windows == passage).all(1).any()
    many = repeats.drawn(corpus, "arxiv", length=2 * support.SEQ_LEN, n=5000, seed=0)
    texts = {text.tobytes() for text, _ in many}
    assert len(many) == 5000 and len(texts) == len(corpus.eval_blocks("arxiv", count=15000).tokens) // 3
    assert len({passage.tobytes() for _, passage in many}) > len(texts)  # a reused text gets another passage
    with pytest.raises(UserError, match=r"--lengths=100000: arxiv .* 33 tokens"):
        repeats.drawn(corpus, "arxiv", length=100_000, n=1, seed=0)


class Copier:
    """Stub model: loss 0 if the last PASSAGE tokens occurred within `reach`, else 4; 9 on the cue."""

    def __init__(self, reach):
        self.reach, self.shapes = reach, []

    def token_losses(self, params, tokens_BT1):
        self.shapes.append(tokens_BT1.shape)
        last, length = tokens_BT1[:, -PASSAGE:], tokens_BT1.shape[1]
        seen = jnp.zeros(len(tokens_BT1), bool)
        for distance in range(PASSAGE, min(self.reach, length - PASSAGE) + 1):
            start = length - PASSAGE - distance
            seen |= (tokens_BT1[:, start : start + PASSAGE] == last).all(1)
        losses = jnp.where(seen[:, None], 0.0, jnp.full((1, length - 1), 4.0))
        return losses.at[:, -PASSAGE : CUE - PASSAGE].set(9.0)


def test_loss_excludes_the_cue(monkeypatch, corpus):
    config = support.tiny("transformer_pp")
    m = Pretrained(model=Model(config.model, max_len=8), params={}, config=config, step=0, mesh=make_mesh())
    copier = Copier(reach=100)
    monkeypatch.setattr(m.model, "token_losses", copier.token_losses)
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(50, size=201), rng.integers(50, size=PASSAGE)) for _ in range(3)]
    monkeypatch.setattr(repeats, "drawn", lambda *_, **__: pairs)
    result = repeats.measure(m, corpus, "arxiv", length=200, n=3, seed=0, batch_size=5)
    assert result == {"alone": 4.0, "losses": {"64": 0.0, "128": 4.0, "137": 4.0}, "samples": 3}
    assert set(copier.shapes) == {(5, 201)}  # one compiled program


def test_command_on_a_run(blocks_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(repeats, "PASSAGE", 10)
    train(support.run_config(blocks_dir, train__steps=2), tmp_path)
    capsys.readouterr()
    command = [f"--workdir={tmp_path}", "--samples=2", "--batch_size=8"]
    repeats.main([*command, "--lengths=32,64", "--domain=github"])
    out = capsys.readouterr().out
    assert "32 tokens, 2 samples" in out and "64 tokens, 2 samples" in out and "  baseline  " in out
    saved = json.loads((tmp_path / "repeats.json").read_text())
    assert list(saved["lengths"]["32"]["losses"]) == ["10", "20", "23"]
    assert {key: saved[key] for key in ("step", "seed", "samples", "domain")} == {
        "step": 2, "seed": 0, "samples": 2, "domain": "github"
    }  # fmt: skip
    monkeypatch.setattr(repeats, "measure", None)  # all lengths have results
    repeats.main([*command, "--lengths=64", "--domain=github"])
    for argument, match in (
        ("--lengths=12", "--lengths: .* at least 20"),
        ("--domain=nowhere", "--domain=nowhere: .*arxiv"),
        ("--samples=0", "--samples=0"),
    ):
        with pytest.raises(UserError, match=match):
            repeats.main([*command, argument])
