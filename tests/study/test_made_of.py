"""What a gap is made of: the parts add up to it, and their intervals are those of gaps of blocks."""

import numpy as np
import pytest

from seqjax.config import DataConfig
from seqjax.data import EvalBlocks, open_corpus
from seqjax.study import __main__ as study
from seqjax.study import made_of, records, statistics
from seqjax.training import eval_losses
from seqjax.training.eval_losses import ClassSums, DomainSums
from seqjax.utils import UserError
from tests import support
from tests.study.synthetic import DOCUMENTS, DOMAINS, write_run, write_study

pytestmark = pytest.mark.usefixtures("undrawn_pictures")

T = support.SEQ_LEN
NAMES = eval_losses.names(T)
TOKENS = {d: np.random.default_rng(i).integers(0, 5, (len(n), T + 1)) for i, (d, n) in enumerate(DOCUMENTS.items())}
RATES = np.array([0.5, 5.0, 50.0, 5e3, 5e5])


def token_losses(domain: str, seed: int) -> np.ndarray:
    """Of every token of the blocks of a domain, with what a document adds."""
    rng = np.random.default_rng(seed)
    of_document = rng.normal(size=12)[DOCUMENTS[domain], None]
    return (3 + 0.1 * of_document + rng.random((len(DOCUMENTS[domain]), T))).astype(np.float32)


def sums_of(seed: int, *, extra: float = 0.0) -> ClassSums:
    """The sums of a run; tokens that continue as before cost `extra` nats more out of domain."""
    domains = {}
    for domain, documents in DOCUMENTS.items():
        blocks = EvalBlocks(TOKENS[domain], np.arange(len(documents)), documents, np.zeros(len(documents), np.int64))
        as_before = eval_losses.classify(TOKENS[domain], RATES)["repeat"] == 2
        losses = token_losses(domain, seed) + extra * as_before * (domain in DOMAINS)
        domains[domain] = eval_losses.sums(losses, blocks, RATES)
    return ClassSums(3, NAMES, domains)


def test_the_parts_of_every_family_add_up_to_the_gap():
    both = [(sums_of(1, extra=0.5), sums_of(2)), (sums_of(3, extra=0.5), sums_of(4))]
    for domain in DOCUMENTS:
        gap = made_of.total(both, domain)
        of_seeds = [token_losses(domain, a).mean() - token_losses(domain, b).mean() for a, b in ((1, 2), (3, 4))]
        as_before = (eval_losses.classify(TOKENS[domain], None)["repeat"] == 2).mean() * (domain in DOMAINS)
        assert gap.contribution.gap == pytest.approx(np.mean(of_seeds) + 0.5 * as_before, abs=1e-6)
        assert (gap.share, gap.gap) == (1, pytest.approx(gap.contribution.gap))
        for family in NAMES:
            found = made_of.parts(both, domain, family)
            assert sum(part.share for part in found) == pytest.approx(1)
            assert sum(part.contribution.gap for part in found) == pytest.approx(gap.contribution.gap)
            for part in found:
                assert part.contribution.gap == pytest.approx(part.share * part.gap)
                assert part.ours - part.theirs == pytest.approx(part.gap)


def test_the_part_of_a_class_is_found_where_it_was_put():
    """The same losses but for what continues as before: all of the gap is there, and none in domain."""
    both = [(sums_of(1, extra=0.5), sums_of(1))]
    new, otherwise, as_before = made_of.parts(both, "arxiv", "repeat")
    assert as_before.name == "continues as before"
    assert as_before.gap == pytest.approx(0.5, abs=1e-6)
    assert new.gap == otherwise.gap == 0
    assert made_of.total(both, "c4").gap == 0


@pytest.mark.parametrize("seeds", [[(1, 2)], [(1, 2), (3, 4), (5, 6)]])
def test_the_interval_is_that_of_the_gaps_of_blocks(seeds):
    both = [(sums_of(a), sums_of(b)) for a, b in seeds]
    losses = np.stack([token_losses("arxiv", a).astype(float) - token_losses("arxiv", b) for a, b in seeds])
    in_class = eval_losses.classify(TOKENS["arxiv"], RATES)["repeat"]
    for part in [made_of.total(both, "arxiv"), *made_of.parts(both, "arxiv", "repeat")]:
        mask = in_class == NAMES["repeat"].index(part.name) if part.name != "all" else np.ones_like(in_class)
        gaps = (losses * mask).mean(-1)  # per token of a block, of the class or not
        width = statistics.mean_half_width([(gaps, DOCUMENTS["arxiv"])], [1.0])
        assert part.contribution.half_width == pytest.approx(float(width), rel=1e-5)


def test_a_single_document_has_no_interval():
    sums = sums_of(1).domains["c4"]
    tokens, losses = ({"repeat": x["repeat"][:1]} for x in (sums.tokens, sums.losses))
    one = ClassSums(
        3, {"repeat": NAMES["repeat"]}, {"c4": DomainSums(sums.documents[:1], sums.blocks[:1], losses, tokens)}
    )
    assert made_of.total([(one, one)], "c4").contribution == (0, None)


def test_what_is_written_is_read(tmp_path):
    found = {"a/b": sums_of(1), "slow": sums_of(2)}
    made_of.write(tmp_path, found)
    read = made_of.read(tmp_path)
    assert list(read) == list(found)
    for label, sums in found.items():
        assert (read[label].step, read[label].names) == (sums.step, sums.names)
        for domain, of in sums.domains.items():
            got = read[label].domains[domain]
            np.testing.assert_array_equal(got.blocks, of.blocks)
            for family in NAMES:
                np.testing.assert_array_equal(got.tokens[family], of.tokens[family])
                np.testing.assert_allclose(got.losses[family], of.losses[family], rtol=1e-6)
    made_of.write(tmp_path, {})
    assert made_of.read(tmp_path) == {}


def test_many_documents_are_kept_in_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(made_of, "MAX_GROUPS", 5)
    found = {"x": sums_of(1), "slow": sums_of(2)}
    made_of.write(tmp_path, found)
    read = made_of.read(tmp_path)
    got, want = (made_of.parts([(of["x"], of["slow"])], "arxiv", "repeat") for of in (read, found))
    assert len(read["x"].domains["arxiv"].blocks) == 5
    assert read["x"].domains["arxiv"].blocks.sum() == len(DOCUMENTS["arxiv"])
    for a, b in zip(got, want, strict=True):
        assert (a.name, a.share) == (b.name, b.share)
        assert a.contribution.gap == pytest.approx(b.contribution.gap, abs=1e-6)


def write_classes(workdir, corpus, seed):
    """As training writes them, on the blocks of a corpus."""
    blocks = {d: corpus.eval_blocks(d, count=9) for d in ("commoncrawl", "c4", *DOMAINS)}
    rng = np.random.default_rng(seed)
    losses = {d: rng.random((len(of.tokens), T)).astype(np.float32) for d, of in blocks.items()}
    eval_losses.write_classes(workdir, 2, losses, blocks, corpus)
    return losses


def test_the_section_of_a_study(tmp_path, blocks_dir):
    data = DataConfig(corpus="blocks", path=str(blocks_dir))
    corpus = open_corpus(data, seq_len=T, vocab_size=258)
    runs = {label: write_run(tmp_path / label, [4.0, 3.0], noise=i) for i, label in enumerate(("slow", "x", "bare"))}
    losses = {label: write_classes(runs[label], corpus, i) for i, label in enumerate(("slow", "x"))}
    study.main([f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={tmp_path / 'out'}"])
    found, messages = made_of.collect(runs)
    assert list(found) == ["slow", "x"]
    assert len(messages) == 1 and "bare" in messages[0]
    text = made_of.section(records.read(tmp_path / "out"), found, "slow")
    assert "### x" in text and "### bare" not in text
    rows = [line.split(" | ") for line in text.splitlines() if " | all | " in line]
    assert [row[0].removeprefix("| ") for row in rows] == ["commoncrawl", "c4", *DOMAINS], "in domain first"
    for row in rows:
        of = [losses[label][row[0].removeprefix("| ")].astype(float).mean() for label in ("x", "slow")]
        assert row[3:6] == [f"{of[0]:.3f}", f"{of[1]:.3f}", f"{of[0] - of[1]:+.3f}"]
    assert made_of.section(records.read(tmp_path / "out"), {}, "slow") == ""
    with pytest.raises(UserError, match="no model 'y'"):
        made_of.section(records.read(tmp_path / "out"), found, "y")

    other = open_corpus(
        DataConfig(corpus="blocks", path=str(blocks_dir), weights=(0.01, 0.99)), seq_len=T, vocab_size=258
    )
    write_classes(runs["bare"], other, 5)
    with pytest.raises(UserError, match=r"bare are not those of slow: .*eval\.seed"):
        made_of.collect(runs)
