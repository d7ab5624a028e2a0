"""The benchmark of shortlists: ranks by hand, tables against their definitions, and a trained run end to end."""

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


def test_rank_counts_what_comes_before():
    score = jnp.asarray([[3.0, 5.0, 3.0, -jnp.inf]])
    for target, expected in ((1, 0), (0, 1), (2, 2), (3, 3)):
        assert shortlists.rank(score, jnp.asarray([target])) == expected


def test_tables_are_what_their_names_say(keys):
    q, k = keys[0][0], keys[1]
    found = shortlists.tables(jnp.asarray(q), jnp.asarray(k), 0.5)
    s = 0.5 * np.einsum("qhk,cshk->qhcs", q, k)
    np.testing.assert_allclose(found["mean"], s.mean(-1), atol=1e-6)
    np.testing.assert_allclose(found["2 means"], s.reshape(*s.shape[:-1], 2, 4).mean(-1).max(-1), atol=1e-6)
    np.testing.assert_allclose(found["8 means"], s.max(-1), atol=1e-6)  # one key each
    # Of keys that differ along one channel alone both second orders are the variance of s.
    k[..., 1:] = k[:, :1, :, 1:]
    s = 0.5 * np.einsum("qhk,cshk->qhcs", q, k)
    found = shortlists.tables(jnp.asarray(q), jnp.asarray(k), 0.5)
    for name in ("mean, variance", "mean, leading"):
        np.testing.assert_allclose(found[name], s.mean(-1) + s.var(-1) / 2, atol=1e-5)


def test_a_group_by_hand(keys):
    """Four past chunks: the others do not count; shared lists are those of the largest share."""
    q, k = keys[0][:, 0], keys[1]
    found = shortlists.of_group(jnp.asarray(q), jnp.asarray(k), jnp.asarray(32), chunk_size=8)
    s = 0.5 * np.einsum("qhk,cshk->qhcs", q, k[:4])
    mass = np.exp(s).sum(-1)
    np.testing.assert_array_equal(found["past"], np.full((5, 2), 4))
    np.testing.assert_allclose(found["share/exact"], mass.max(-1) / mass.sum(-1), rtol=1e-5)
    best = np.sort(s.max(-1), -1)
    np.testing.assert_allclose(found["gap/best_key"], best[..., -1] - best[..., -2], rtol=1e-4)
    order = np.argsort(-s.mean(-1), -1, kind="stable")
    expected = (order == s.max(-1).argmax(-1)[..., None]).argmax(-1)
    np.testing.assert_array_equal(found["rank/best_key/own/mean"], expected)
    means = np.exp(s.mean(-1))
    shared = (means / means.sum(-1, keepdims=True)).max(0)
    order = np.argsort(-shared, -1, kind="stable")
    expected = (order[None] == mass.argmax(-1)[..., None]).argmax(-1)
    np.testing.assert_array_equal(found["rank/exact/shared/mean"], expected)


@pytest.mark.slow
def test_a_run_is_measured(blocks_dir, tmp_path, capsys):
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
        assert values == sorted(values), "a longer list finds no less"
    assert out.with_suffix(".png").is_file()
    with pytest.raises(UserError, match="--domain=nowhere"):
        shortlists.main([f"--run={tmp_path / 'run'}", "--domain=nowhere"])
