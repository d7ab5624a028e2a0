"""Test lab.benchmarks.shortlists: ranks, tables, and a trained run end to end."""

import jax.numpy as jnp
import numpy as np
import pytest

from lab.benchmarks import shortlists
from seqjax.errors import UserError
from seqjax.training.loop import train
from tests import support


@pytest.fixture
def keys():
    rng = np.random.default_rng(0)
    return rng.normal(size=(5, 3, 2, 4)).astype("float32"), rng.normal(size=(6, 8, 2, 4)).astype("float32")


def test_rank_counts_preceding_chunks():
    score = jnp.asarray([[3.0, 5.0, 3.0, -jnp.inf]])
    for target, expected in ((1, 0), (0, 1), (2, 2), (3, 3)):
        assert shortlists.rank(score, jnp.asarray([target])) == expected


def test_tables_match_their_definitions(keys):
    q, k = keys[0][0], keys[1]
    estimates = shortlists.tables(jnp.asarray(q), jnp.asarray(k), 0.5)
    s = 0.5 * np.einsum("qhk,cshk->qhcs", q, k)
    np.testing.assert_allclose(estimates["mean"], s.mean(-1), atol=1e-6)
    np.testing.assert_allclose(estimates["2 means"], s.reshape(*s.shape[:-1], 2, 4).mean(-1).max(-1), atol=1e-6)
    np.testing.assert_allclose(estimates["8 means"], s.max(-1), atol=1e-6)  # one key each
    # If keys differ in one channel only, both second-order terms equal the variance of s.
    k[..., 1:] = k[:, :1, :, 1:]
    s = 0.5 * np.einsum("qhk,cshk->qhcs", q, k)
    estimates = shortlists.tables(jnp.asarray(q), jnp.asarray(k), 0.5)
    for name in ("mean, variance", "mean, leading"):
        np.testing.assert_allclose(estimates[name], s.mean(-1) + s.var(-1) / 2, atol=1e-5)


def test_group_measurements_match_numpy(keys):
    """Only the four past chunks count; shared lists rank chunks by share."""
    q, k = keys[0][:, 0], keys[1]
    measured = shortlists.of_group(jnp.asarray(q), jnp.asarray(k), jnp.asarray(32), chunk_size=8)
    s = 0.5 * np.einsum("qhk,cshk->qhcs", q, k[:4])
    mass = np.exp(s).sum(-1)
    np.testing.assert_array_equal(measured["past"], np.full((5, 2), 4))
    np.testing.assert_allclose(measured["share/exact"], mass.max(-1) / mass.sum(-1), rtol=1e-5)
    best = np.sort(s.max(-1), -1)
    np.testing.assert_allclose(measured["gap/best_key"], best[..., -1] - best[..., -2], rtol=1e-4)
    order = np.argsort(-s.mean(-1), -1, kind="stable")
    expected = (order == s.max(-1).argmax(-1)[..., None]).argmax(-1)
    np.testing.assert_array_equal(measured["rank/best_key/own/mean"], expected)
    means = np.exp(s.mean(-1))
    shared = (means / means.sum(-1, keepdims=True)).max(0)
    order = np.argsort(-shared, -1, kind="stable")
    expected = (order[None] == mass.argmax(-1)[..., None]).argmax(-1)
    np.testing.assert_array_equal(measured["rank/exact/shared/mean"], expected)


@pytest.mark.slow
def test_trained_run_is_measured(blocks_dir, tmp_path, capsys):
    config = support.run_config(blocks_dir, train__steps=2)
    train(config, tmp_path / "run")
    out = tmp_path / "out.json"
    shortlists.main([f"--run={tmp_path / 'run'}", "--blocks=2", "--groups=9", "--chunk_size=8", f"--json={out}"])
    assert "| best_key, shared list: % found among | 1 | 2 |" in capsys.readouterr().out
    result = shortlists.report.load(out)
    n_layers, heads = config.model.n_layers, 2
    assert len(result["layers"]) == n_layers
    assert result["results"]["queries"] == n_layers * 2 * (2 * 8) * heads
    for row in result["results"]["recall"].values():
        values = list(row.values())
        assert values == sorted(values), "recall grows with the list"
    assert out.with_suffix(".png").is_file()
    with pytest.raises(UserError, match="--domain=nowhere"):
        shortlists.main([f"--run={tmp_path / 'run'}", "--domain=nowhere"])
