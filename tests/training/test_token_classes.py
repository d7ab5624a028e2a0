"""Token classes compared with a direct search, and a run's class sums compared with its evaluation losses."""

import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from seqjax.config import DataConfig
from seqjax.data import EvalBlocks, open_corpus
from seqjax.data.corpora import TestedCorpus
from seqjax.training import eval_losses, schedule, token_classes
from seqjax.training.loop import train
from tests import support

FAMILIES = ("repeat", "distance", "frequency", "position")
# Class name -> its first and last value.
DISTANCES = {"1 to 31": (1, 31), "32 to 127": (32, 127), "128 to 255": (128, 255), "256 to 1,023": (256, 1023)}
POSITIONS = {"0 to 31": (0, 31), "32 to 127": (32, 127), "128 to 511": (128, 511), "512 to 1,023": (512, 1023)}
LONG = {"1,024 to 4,095": (1024, 4095)}  # for distances and positions in blocks of more than 4,096 predicted tokens


def class_of(value: float, ranges: dict[str, tuple[int, int]], seq_len: int) -> str:
    classes, last = (ranges | LONG, "4,096 and more") if seq_len > 4096 else (ranges, "1,024 and more")
    return next((name for name, (low, high) in classes.items() if low <= value <= high), last)


def classes_by_search(tokens: np.ndarray, rates: np.ndarray, t: int) -> dict[str, str]:
    """Search all earlier positions of a block and return the classes of token t."""
    repeats = [s for s in range(2, t) if t >= 2 and (tokens[s - 2 : s] == tokens[t - 2 : t]).all()]
    rate = rates[tokens[t]]
    frequency = "below 1" if rate < 1 else "10,000 and more"
    for low, high in ((1, 10), (10, 100), (100, 1000), (1000, 10000)):
        if low <= rate < high:
            frequency = f"{low:,} to {high:,}"
    classes = {
        "frequency": frequency,
        "position": class_of(t - 1, POSITIONS, len(tokens) - 1),
        "distance": "not as before",
    }
    if not repeats:
        return classes | {"repeat": "new bigram"}
    if tokens[repeats[-1]] != tokens[t]:
        return classes | {"repeat": "continues otherwise"}
    return classes | {
        "repeat": "continues as before",
        "distance": class_of(t - repeats[-1], DISTANCES, len(tokens) - 1),
    }


def assert_classes_match_search(rows: np.ndarray, rates: np.ndarray):
    class_ids, names = token_classes.classify(rows, rates), token_classes.names(rows.shape[1] - 1)
    assert tuple(class_ids) == FAMILIES == tuple(names)
    for n, tokens in enumerate(rows):
        for t in range(1, len(tokens)):
            actual = {family: names[family][ids[n, t - 1]] for family, ids in class_ids.items()}
            assert actual == classes_by_search(tokens, rates, t)


@hypothesis.given(
    st_numpy.arrays(
        np.uint16, st.tuples(st.integers(1, 3), st.integers(2, 60)), elements=st.sampled_from([0, 1, 2, 65535])
    ),
    st.lists(st.sampled_from([0.0, 0.99, 1.0, 9.9, 10.0, 500.0, 1000.0, 9999.0, 10000.0]), min_size=4, max_size=4),
)
@hypothesis.settings(deadline=None)
def test_classes_match_search(rows, some_rates):
    rates = np.zeros(65536)
    rates[[0, 1, 2, 65535]] = some_rates
    assert_classes_match_search(rows, rates)


@pytest.mark.slow
def test_classes_of_long_blocks():
    """A phrase repeats at the first and last distance of each class."""
    tokens = np.arange(10, 1500, dtype=np.uint32)
    repeats = {40: 31, 90: 32, 180: 127, 200: 128, 300: 255, 360: 256, 1200: 1023, 1300: 1024}
    for at, distance in repeats.items():
        tokens[at - 2 : at + 1] = tokens[at - 2 - distance : at + 1 - distance]
    assert_classes_match_search(tokens[None], np.full(1500, 2.0))
    class_ids = token_classes.classify(tokens[None], np.full(1500, 2.0))
    counts = np.bincount(class_ids["distance"][0], minlength=6)
    np.testing.assert_array_equal(counts[1:], [1, 2, 2, 2, 1])


def test_classes_of_blocks_beyond_4096_tokens():
    """Only longer blocks have these classes: 4,096 predicted tokens have no position 4,096."""
    tokens = np.arange(10, 5010, dtype=np.uint32)
    for at, distance in ((4500, 4095), (4600, 4096)):
        tokens[at - 2 : at + 1] = tokens[at - 2 - distance : at + 1 - distance]
    class_ids, names = token_classes.classify(tokens[None], None), token_classes.names(4999)
    assert [names["distance"][class_ids["distance"][0, at - 1]] for at in (4500, 4600)] == list(names["distance"][-2:])
    assert names["distance"][-2:] == names["position"][-2:] == ("1,024 to 4,095", "4,096 and more")
    assert [names["position"][class_ids["position"][0, t]] for t in (4095, 4096)] == list(names["position"][-2:])
    assert token_classes.names(4096)["position"][-1] == "1,024 and more"
    assert token_classes.names(102_400)["distance"][-3:] == ("4,096 to 16,383", "16,384 to 65,535", "65,536 and more")


def test_no_frequency_class_without_rates():
    class_ids = token_classes.classify(np.zeros((1, 9), np.uint16), None)
    assert "frequency" not in class_ids and len(class_ids) == 3


def test_sums_add_up_each_document_s_blocks():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, (7, 41)).astype(np.uint16)
    documents = np.array([30, 4, 4, 9, 30, 30, 9])
    losses = rng.random((7, 40)).astype(np.float32)
    blocks = EvalBlocks(tokens, np.arange(7), documents, np.full(7, 40))
    sums = token_classes.sums(losses, blocks, np.array([0.5, 5.0, 50.0, 5e5]))
    np.testing.assert_array_equal(sums.documents, [4, 9, 30])
    np.testing.assert_array_equal(sums.blocks, [2, 2, 3])
    expected = [losses[documents == d].astype(np.float64).sum() for d in (4, 9, 30)]
    for family in FAMILIES:
        np.testing.assert_allclose(sums.losses[family].sum(1), expected, rtol=1e-12)
        np.testing.assert_array_equal(sums.tokens[family].sum(1), [80, 80, 120])
    rare = (tokens[:, 1:] == 0) & (documents == 9)[:, None]
    assert sums.tokens["frequency"][1, 0] == rare.sum()
    assert sums.losses["frequency"][1, 0] == pytest.approx(losses[rare].astype(np.float64).sum())


# ------------------------------------------------------------------------------------------------------------- rates
def test_rates_weight_training_blocks_by_domain_share(blocks_dir):
    config = DataConfig(corpus="blocks", path=str(blocks_dir), weights=(0.25, 0.75))
    corpus = open_corpus(config, seq_len=support.SEQ_LEN, vocab_size=258)
    expected = np.zeros(258)
    for domain, weight in (("commoncrawl", 0.25), ("c4", 0.75)):
        ids = corpus.train_sample(domain, count=10**9).ravel().tolist()
        for token, n in collections.Counter(ids).items():
            expected[token] += weight * 1e6 * n / len(ids)
    rates = corpus.token_rates()
    assert rates is not None
    np.testing.assert_allclose(rates, expected, rtol=1e-9)
    with_test_sets = TestedCorpus(corpus, {"other": corpus}).token_rates()
    assert with_test_sets is not None
    np.testing.assert_array_equal(with_test_sets, rates)


def test_builtin_corpus_rates_sum_to_a_million(corpus_cache):
    corpus = open_corpus(DataConfig(cache_dir=corpus_cache), seq_len=256, vocab_size=258)
    rates = corpus.token_rates()
    assert rates is not None
    assert rates.sum() == pytest.approx(1e6)
    assert rates[ord("e")] > rates[ord("z")] > 0


# -------------------------------------------------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def run(blocks_dir, tmp_path_factory):
    """Train a run with sharded sequences, batches and parameters; it evaluates 10 blocks in batches of 8."""
    workdir = tmp_path_factory.mktemp("classes") / "run"
    config = support.run_config(
        blocks_dir,
        "transformer_pp",
        train__steps=8,
        mesh__data=2,
        mesh__fsdp=2,
        mesh__seq=2,
        eval__classes=True,
        checkpoint__every=0,
    )
    assert train(config, workdir) is True
    return workdir


def test_run_sums_match_its_last_evaluation(run):
    class_sums = token_classes.read_classes(run)
    assert class_sums is not None
    assert (class_sums.step, tuple(class_sums.names)) == (8, FAMILIES)
    blocks_file, losses = eval_losses.read(run)
    assert list(class_sums.domains) == ["commoncrawl", "c4", "arxiv", "github", "stackexchange"]
    for domain, sums in class_sums.domains.items():
        block_losses, documents = losses[8][domain].astype(np.float64), blocks_file[f"{domain}/documents"]
        expected = [block_losses[documents == d].sum() * support.SEQ_LEN for d in sums.documents]
        assert sums.blocks.sum() == len(block_losses)
        for family in FAMILIES:
            assert sums.losses[family].shape == (len(sums.documents), len(class_sums.names[family]))
            np.testing.assert_allclose(sums.losses[family].sum(1), expected, rtol=1e-6)
            np.testing.assert_array_equal(sums.tokens[family].sum(1), sums.blocks * support.SEQ_LEN)
        assert sums.tokens["position"][:, 1:].sum() == 0, "blocks have 32 tokens"
    as_before = class_sums.domains["c4"].tokens["repeat"].sum(0)[2]
    assert as_before > 0, "the text repeats twelve words"


def test_last_of_several_ends_is_read(run, tmp_path):
    with np.load(run / eval_losses.DIRECTORY / token_classes.CLASSES) as file:
        arrays = {name: array for name, array in file.items() if not name.startswith("run/")}  # without a run identity
    for step in (9, 10):
        directory = tmp_path / schedule.ENDS / str(step) / eval_losses.DIRECTORY
        directory.mkdir(parents=True)
        np.savez(directory / token_classes.CLASSES, allow_pickle=False, **arrays | {"step": np.array(step)})
    class_sums = token_classes.read_classes(tmp_path)
    assert class_sums is not None
    assert class_sums.step == 10
