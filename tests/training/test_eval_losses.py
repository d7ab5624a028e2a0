"""Block losses across a resume: later losses are removed, and the blocks must not change."""

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


def test_resume_removes_losses_of_repeated_steps(workdir, blocks):
    eval_losses.start(workdir, blocks, step=4)
    blocks_file, losses = eval_losses.read(workdir)
    assert sorted(losses) == [2, 4]
    assert {key for key in blocks_file if key.startswith("c4/")} == {
        "c4/index", "c4/documents", "c4/n_bytes", "c4/sha256",
    }  # fmt: skip


@pytest.fixture
def with_sources(blocks):
    sources_by_domain = {"c4": np.array([7, 7, 8]), "arxiv": None}
    return {name: dataclasses.replace(blocks[name], sources=sources) for name, sources in sources_by_domain.items()}


def test_known_sources_are_stored(with_sources, tmp_path):
    eval_losses.start(tmp_path, with_sources, step=0)
    blocks_file, _ = eval_losses.read(tmp_path)
    assert blocks_file["c4/sources"].tolist() == [7, 7, 8]
    assert "arxiv/sources" not in blocks_file
    assert eval_losses.domains_of(blocks_file) == {"c4", "arxiv"}


def test_resume_keeps_or_adds_sources(workdir, blocks, with_sources):
    """Losses compare if the text is equal, whether its sources are known or not."""
    eval_losses.start(workdir, with_sources, step=6)
    assert eval_losses.read(workdir)[0]["c4/sources"].tolist() == [7, 7, 8]
    all_sources = {name: dataclasses.replace(b, sources=np.array([1, 2, 3])) for name, b in blocks.items()}
    for resumed_blocks in (all_sources, blocks):
        eval_losses.start(workdir, resumed_blocks, step=6)
        blocks_file, losses = eval_losses.read(workdir)
        assert blocks_file["c4/sources"].tolist() == [7, 7, 8]
        assert blocks_file["arxiv/sources"].tolist() == [1, 2, 3]
        assert sorted(losses) == [2, 4, 6]


def test_too_few_sources_are_rejected(blocks, tmp_path):
    blocks["c4"] = dataclasses.replace(blocks["c4"], sources=np.array([7, 8]))
    eval_losses.start(tmp_path, blocks, step=0)
    with pytest.raises(UserError, match=r"blocks\.npz: .*'c4/sources' .*\[2\].*\[3\]"):
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
def test_resume_rejects_changed_evaluation_blocks(workdir, blocks, changes):
    blocks["arxiv"] = dataclasses.replace(blocks["arxiv"], **changes)
    with pytest.raises(UserError, match=r"blocks\.npz: .* arxiv "):
        eval_losses.start(workdir, blocks, step=4)
    eval_losses.start(workdir, blocks, step=0)  # a new run may use other blocks


def test_resume_rejects_missing_domain(workdir, blocks):
    del blocks["c4"]
    with pytest.raises(UserError, match=r"blocks\.npz: .* c4 "):
        eval_losses.start(workdir, blocks, step=4)


def test_losses_without_a_domain_are_rejected(workdir):
    last = eval_losses.path(workdir, 6)
    assert eval_losses.fault(last) == ""
    eval_losses.write(workdir, 6, {"arxiv": np.full(3, 6.0)})
    assert eval_losses.fault(last) == "is without c4"
    with pytest.raises(UserError, match=r"00000006\.npz.*c4"):
        eval_losses.read(workdir)


def test_directory_in_place_of_class_sums_is_rejected(workdir):
    (workdir / "eval_losses" / "classes.npz").mkdir()
    with pytest.raises(UserError, match=r"classes\.npz"):
        token_classes.read_classes(workdir)
