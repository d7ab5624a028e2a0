"""The losses of blocks across a resume: later ones are removed, and all are of the same blocks."""

import dataclasses

import numpy as np
import pytest

from seqjax.data import EvalBlocks
from seqjax.errors import UserError
from seqjax.training import eval_losses, token_classes


@pytest.fixture
def blocks():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 100, (3, 9), dtype=np.uint16)
    return {name: EvalBlocks(tokens, np.arange(3), np.array([0, 0, 1]), np.full(3, 20)) for name in ("c4", "arxiv")}


@pytest.fixture
def workdir(blocks, tmp_path):
    eval_losses.start(tmp_path, blocks, step=0)
    for step in (2, 4, 6):
        eval_losses.write(tmp_path, step, {name: np.full(3, float(step)) for name in blocks})
    return tmp_path


def test_a_resumed_run_has_no_losses_of_steps_that_it_repeats(workdir, blocks):
    eval_losses.start(workdir, blocks, step=4)
    described, losses = eval_losses.read(workdir)
    assert sorted(losses) == [2, 4]
    assert {key for key in described if key.startswith("c4/")} == {
        "c4/index", "c4/documents", "c4/n_bytes", "c4/sha256",
    }  # fmt: skip


@pytest.fixture
def with_sources(blocks):
    known = {"c4": np.array([7, 7, 8]), "arxiv": None}
    return {name: dataclasses.replace(blocks[name], sources=sources) for name, sources in known.items()}


def test_known_sources_are_stored(with_sources, tmp_path):
    eval_losses.start(tmp_path, with_sources, step=0)
    described, _ = eval_losses.read(tmp_path)
    assert described["c4/sources"].tolist() == [7, 7, 8]
    assert "arxiv/sources" not in described
    assert eval_losses.domains_of(described) == {"c4", "arxiv"}


def test_a_resumed_run_keeps_its_sources_or_adds_them(workdir, blocks, with_sources):
    """The text decides whether losses compare, not what is known of it."""
    eval_losses.start(workdir, with_sources, step=6)
    assert eval_losses.read(workdir)[0]["c4/sources"].tolist() == [7, 7, 8]
    others = {name: dataclasses.replace(b, sources=np.array([1, 2, 3])) for name, b in blocks.items()}
    for again in (others, blocks):
        eval_losses.start(workdir, again, step=6)
        described, losses = eval_losses.read(workdir)
        assert described["c4/sources"].tolist() == [7, 7, 8]
        assert described["arxiv/sources"].tolist() == [1, 2, 3]
        assert sorted(losses) == [2, 4, 6]


def test_sources_of_fewer_blocks_are_named(blocks, tmp_path):
    blocks["c4"] = dataclasses.replace(blocks["c4"], sources=np.array([7, 8]))
    eval_losses.start(tmp_path, blocks, step=0)
    with pytest.raises(UserError, match=r"blocks\.npz: the array 'c4/sources' is int64 \[2\], not \[3\]"):
        eval_losses.read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"documents": np.array([0, 1, 1])},
        {"index": np.array([0, 1, 3])},
        {"n_bytes": np.array([20, 20, 21])},
        {"tokens": np.zeros((3, 9), np.uint16)},
    ],
)
def test_a_run_does_not_go_on_with_other_evaluation_blocks(workdir, blocks, changes):
    blocks["arxiv"] = dataclasses.replace(blocks["arxiv"], **changes)
    with pytest.raises(UserError, match=r"blocks\.npz: this run was evaluated on other text of arxiv than it would be"):
        eval_losses.start(workdir, blocks, step=4)
    eval_losses.start(workdir, blocks, step=0)  # from the beginning


def test_a_run_does_not_go_on_with_other_domains(workdir, blocks):
    del blocks["c4"]
    with pytest.raises(UserError, match="other text of c4 than"):
        eval_losses.start(workdir, blocks, step=4)


def test_the_losses_of_a_domain_are_missed(workdir):
    last = eval_losses.path(workdir, 6)
    assert eval_losses.fault(last) == ""
    eval_losses.write(workdir, 6, {"arxiv": np.full(3, 6.0)})
    assert eval_losses.fault(last) == "is without c4"
    with pytest.raises(UserError, match=r"00000006\.npz.*c4"):
        eval_losses.read(workdir)


def test_a_directory_in_place_of_the_sums_of_classes_is_named(workdir):
    (workdir / "eval_losses" / "classes.npz").mkdir()
    with pytest.raises(UserError, match=r"classes\.npz"):
        token_classes.read_classes(workdir)
