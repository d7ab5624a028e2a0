"""Token-class contributions: their sum, and intervals over documents and seeds."""

import numpy as np
import pytest
from scipy import stats

from seqjax.config import DataConfig
from seqjax.data import EvalBlocks, open_corpus
from seqjax.errors import UserError
from seqjax.study.gaps import classes
from seqjax.training import eval_losses, token_classes
from seqjax.training.token_classes import ClassSums, DomainSums
from tests import support
from tests.study.synthetic import DOCUMENTS, DOMAINS

T = support.SEQ_LEN
NAMES = token_classes.names(T)
TOKENS = {d: np.random.default_rng(i).integers(0, 5, (len(n), T + 1)) for i, (d, n) in enumerate(DOCUMENTS.items())}
RATES = np.array([0.5, 5.0, 50.0, 5e3, 5e5])


def token_losses(domain: str, seed: int) -> np.ndarray:
    """Return token losses [blocks, T]; each document shifts all its tokens."""
    rng = np.random.default_rng(seed)
    document_offsets = rng.normal(size=12)[DOCUMENTS[domain], None]
    return (3 + 0.1 * document_offsets + rng.random((len(DOCUMENTS[domain]), T))).astype(np.float32)


def run_sums(seed: int, *, extra: float = 0.0) -> ClassSums:
    """Return a run's class sums; OOD tokens that repeat cost `extra` nats more."""
    domains = {}
    for domain, documents in DOCUMENTS.items():
        blocks = EvalBlocks(TOKENS[domain], np.arange(len(documents)), documents, np.zeros(len(documents), np.int64))
        continues = token_classes.classify(TOKENS[domain], RATES)["repeat"] == 2
        losses = token_losses(domain, seed) + extra * continues * (domain in DOMAINS)
        domains[domain] = token_classes.sums(losses, blocks, RATES)
    return ClassSums(3, NAMES, domains)


def mean_loss(domain, seeds) -> float:
    return float(np.mean([token_losses(domain, seed).astype(float).mean() for seed in seeds]))


def test_family_contributions_sum_to_the_difference():
    """Sides may have different numbers of seeds."""
    model, reference = [run_sums(1, extra=0.5), run_sums(3, extra=0.5)], [run_sums(2), run_sums(4), run_sums(6)]
    for domain in DOCUMENTS:
        total = classes.total(model, reference, domain)
        continued_share = (token_classes.classify(TOKENS[domain], None)["repeat"] == 2).mean() * (domain in DOMAINS)
        expected = mean_loss(domain, (1, 3)) - mean_loss(domain, (2, 4, 6)) + 0.5 * continued_share
        assert total.contribution.value == pytest.approx(expected, abs=1e-6)
        assert (total.share, total.difference) == (1, pytest.approx(total.contribution.value))
        for family in NAMES:
            parts = classes.parts(model, reference, domain, family)
            assert sum(part.share for part in parts) == pytest.approx(1)
            assert sum(part.contribution.value for part in parts) == pytest.approx(total.contribution.value)
            for part in parts:
                assert part.contribution.value == pytest.approx(part.share * part.difference)
                assert part.model_loss - part.reference_loss == pytest.approx(part.difference)


def test_planted_class_difference_is_recovered():
    model, reference = [run_sums(1, extra=0.5)], [run_sums(1)]
    new, different, continued = classes.parts(model, reference, "arxiv", "repeat")
    assert continued.name == "continues as before"
    assert continued.difference == pytest.approx(0.5, abs=1e-6)
    assert new.difference == different.difference == 0
    assert classes.total(model, reference, "c4").difference == 0
    assert classes.copy_share(model, reference, domains=DOMAINS) == pytest.approx(1)
    without = [ClassSums(3, {"position": NAMES["position"]}, model[0].domains)]
    assert classes.copy_share(without, without, domains=DOMAINS) is None


def test_single_seed_interval_covers_documents():
    """The expected error is the closed-form variance of a ratio estimate."""
    gaps = token_losses("arxiv", 1).astype(float) - token_losses("arxiv", 2)
    document_gaps = np.array([gaps[DOCUMENTS["arxiv"] == d].sum() for d in range(12)]) / gaps.size
    shares = np.bincount(DOCUMENTS["arxiv"]) / len(DOCUMENTS["arxiv"])
    error = np.sqrt(12 / 11 * ((document_gaps - gaps.mean() * shares) ** 2).sum())
    contribution = classes.total([run_sums(1)], [run_sums(2)], "arxiv").contribution
    assert contribution.error == pytest.approx(error, rel=1e-5)
    assert contribution.half == pytest.approx(stats.t.ppf(0.975, 11) * error, rel=1e-5)


def test_seed_variance_widens_the_interval():
    model, reference = (1, 3, 5), (2, 4)
    contribution = classes.total([run_sums(s) for s in model], [run_sums(s) for s in reference], "arxiv").contribution
    seed_variances = [
        np.var([mean_loss("arxiv", [s]) for s in side], ddof=1) / len(side) for side in (model, reference)
    ]
    document_estimate = classes._estimates(
        *(
            np.stack([run_sums(s).domains["arxiv"].losses["repeat"].sum(-1, keepdims=True) for s in side]).mean(
                0, keepdims=True
            )
            for side in (model, reference)
        ),
        run_sums(1).domains["arxiv"].tokens["repeat"].sum(-1, keepdims=True),
        run_sums(1).domains["arxiv"].blocks,
    )[0]
    assert contribution.error**2 == pytest.approx(document_estimate.error**2 + sum(seed_variances), rel=1e-4)


def test_single_document_has_no_interval():
    sums = run_sums(1).domains["c4"]
    tokens, losses = ({"repeat": x["repeat"][:1]} for x in (sums.tokens, sums.losses))
    one = ClassSums(
        3, {"repeat": NAMES["repeat"]}, {"c4": DomainSums(sums.documents[:1], sums.blocks[:1], losses, tokens)}
    )
    contribution = classes.total([one], [one], "c4").contribution
    assert (contribution.value, contribution.half) == (0, None)


def test_class_sums_round_trip(tmp_path):
    written = {"a/b": run_sums(1), "slow": run_sums(2)}
    classes.write(tmp_path, written)
    read = classes.read(tmp_path)
    assert list(read) == list(written)
    for label, sums in written.items():
        assert (read[label].step, read[label].names) == (sums.step, sums.names)
        for domain, domain_sums in sums.domains.items():
            read_sums = read[label].domains[domain]
            np.testing.assert_array_equal(read_sums.blocks, domain_sums.blocks)
            for family in NAMES:
                np.testing.assert_array_equal(read_sums.tokens[family], domain_sums.tokens[family])
                np.testing.assert_allclose(read_sums.losses[family], domain_sums.losses[family], rtol=1e-6)
    classes.write(tmp_path, {})
    assert classes.read(tmp_path) == {}


def test_many_documents_are_stored_in_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(classes, "MAX_GROUPS", 5)
    written = {"x": run_sums(1), "slow": run_sums(2)}
    classes.write(tmp_path, written)
    read = classes.read(tmp_path)
    grouped, exact = (classes.parts([sums["x"]], [sums["slow"]], "arxiv", "repeat") for sums in (read, written))
    assert len(read["x"].domains["arxiv"].blocks) == 5
    assert read["x"].domains["arxiv"].blocks.sum() == len(DOCUMENTS["arxiv"])
    for a, b in zip(grouped, exact, strict=True):
        assert (a.name, a.share) == (b.name, b.share)
        assert a.contribution.value == pytest.approx(b.contribution.value, abs=1e-6)


def test_collect_reports_missing_sums_and_refuses_other_tokens(tmp_path, blocks_dir):
    runs = {label: tmp_path / label for label in ("slow", "x", "bare")}
    for label, weights in {"slow": (), "x": (0.01, 0.99), "bare": None}.items():
        (runs[label] / eval_losses.DIRECTORY).mkdir(parents=True)
        if weights is not None:
            data = DataConfig(corpus="blocks", path=str(blocks_dir), weights=weights)
            corpus = open_corpus(data, seq_len=T, vocab_size=258)
            blocks = {domain: corpus.eval_blocks(domain, count=9) for domain in ("commoncrawl", "c4", "arxiv")}
            losses = {domain: np.ones((len(evaluated.tokens), T), np.float32) for domain, evaluated in blocks.items()}
            token_classes.write_classes(runs[label], 2, losses, blocks, corpus)
    sums, messages = classes.collect({label: runs[label] for label in ("slow", "bare")})
    assert list(sums) == ["slow"] and len(messages) == 1 and "bare" in messages[0]
    with pytest.raises(UserError, match=r"x and slow .*eval\.seed"):
        classes.collect(runs)
