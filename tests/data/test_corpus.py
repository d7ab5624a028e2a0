"""The corpus interface: domains, evaluation blocks, bigram baseline and errors."""

import itertools
import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqjax.config import DataConfig
from seqjax.data import Corpus, bigram, blocks, open_corpus, prepare, slimpajama
from seqjax.errors import UserError

from .conftest import row, some_text, write_shard

T = 32


def open_blocks(path: Path, *, seq_len: int = T, vocab_size: int = 258, **settings: Any) -> Corpus:
    config = DataConfig(**{"corpus": "blocks", "path": str(path)} | settings)
    return open_corpus(config, seq_len=seq_len, vocab_size=vocab_size)


def test_limited_regime(blocks_dir: Path):
    corpus = open_blocks(blocks_dir)
    assert corpus.name == "blocks"
    assert corpus.train_domains == ("commoncrawl", "c4")
    assert corpus.eval_domains == ("commoncrawl", "c4", "arxiv", "github", "stackexchange")
    assert corpus.in_domain == {"commoncrawl", "c4"}
    assert set(corpus.tokens) == {"commoncrawl", "c4"}
    assert sum(corpus.weights.values()) == pytest.approx(1)
    natural = corpus.tokens["c4"] / sum(corpus.tokens.values())
    assert corpus.weights["c4"] == pytest.approx(natural, rel=5e-3)
    assert len(corpus.manifest_hash) == 64


def test_mixed_regime_and_chosen_domains(blocks_dir: Path):
    corpus = open_blocks(blocks_dir, regime="mixed")
    assert corpus.train_domains == corpus.eval_domains == slimpajama.NAMES
    corpus = open_blocks(blocks_dir, train_domains=("arxiv", "c4"), weights=(1.0, 3.0))
    assert corpus.weights == {"arxiv": 0.25, "c4": 0.75}
    assert corpus.eval_domains == ("arxiv", "c4", "commoncrawl", "github", "stackexchange")
    corpus = open_blocks(blocks_dir, eval_domains=("arxiv", "c4"))
    assert corpus.eval_domains == ("c4", "arxiv")


def test_published_shares_sum_to_one():
    assert sum(slimpajama.SHARES.values()) == pytest.approx(1)
    assert len(slimpajama.BY_SET_NAME) == len(slimpajama.NAMES) == 7


def decoded(corpus: Corpus, domain: str, count: int = 10**6) -> str:
    return corpus.tokenizer.decode(corpus.eval_blocks(domain, count=count).tokens.ravel())


def test_in_domain_evaluation_uses_only_validation(blocks_dir: Path):
    corpus = open_blocks(blocks_dir)
    assert "c4 validation" in decoded(corpus, "c4")
    assert "train" not in decoded(corpus, "c4")


def test_ood_evaluation_uses_validation_then_train(blocks_dir: Path):
    corpus = open_blocks(blocks_dir)
    text = decoded(corpus, "arxiv")
    assert text.index("arxiv validation") < text.index("arxiv train")
    # If arxiv is a training domain, its train split is not evaluated:
    assert "train" not in decoded(open_blocks(blocks_dir, regime="mixed"), "arxiv")


def test_evaluation_blocks_have_documents_and_bytes(blocks_dir: Path):
    corpus = open_blocks(blocks_dir)
    evaluation = corpus.eval_blocks("c4", count=10**6)
    assert len(evaluation.tokens) == len(evaluation.index) == len(evaluation.documents) == len(evaluation.n_bytes)
    n_marks = (evaluation.tokens[:, 1:] > 255).sum(axis=1)
    np.testing.assert_array_equal(evaluation.n_bytes, T - n_marks, "one byte per token, none for BOS and EOS")
    # Every document begins with BOS, so this counts documents.
    numbers = np.cumsum(evaluation.tokens.ravel() == 256).reshape(evaluation.tokens.shape) - 1
    for inside, document in zip(numbers, evaluation.documents, strict=True):
        ids, counts = np.unique(inside, return_counts=True)
        assert counts[ids == document] == counts.max()


def test_document_numbers_differ_between_splits(tmp_path: Path):
    """A block of 33 holds three documents of 11 tokens; on a tie the first counts."""
    for split in ("train", "validation"):
        lines = [row(domain, "x" * 9) for domain in ("c4", "arxiv") for _ in range(30)]
        write_shard(tmp_path / "source" / split / "a.jsonl.zst", lines)
    prepare.prepare(str(tmp_path / "source"), tmp_path / "out", tokenizer="byte", seq_len=T, workers=1)
    corpus = open_blocks(tmp_path / "out", train_domains=("c4",), eval_domains=("arxiv",))
    assert corpus.eval_blocks("arxiv", count=10**6).documents.tolist() == list(range(0, 60, 3))


def test_few_blocks_are_spread_over_documents(blocks_dir: Path):
    corpus = open_blocks(blocks_dir)
    every = corpus.eval_blocks("arxiv", count=10**6)
    n_documents = len(np.unique(every.documents))
    assert 1 < n_documents < len(every.tokens)
    few = corpus.eval_blocks("arxiv", count=n_documents)
    assert len(np.unique(few.documents)) == n_documents, "one block per document before a second one"
    np.testing.assert_array_equal(few.tokens, every.tokens[few.index])
    same_seed, other_seed = (corpus.eval_blocks("arxiv", count=n_documents, seed=s).index for s in (0, 1))
    np.testing.assert_array_equal(few.index, same_seed)
    assert not np.array_equal(few.index, other_seed)


def test_bigram_is_a_distribution_and_learns():
    rng = np.random.default_rng(0)
    steps = rng.choice([1, 2], size=(60, 50), p=[0.9, 0.1])
    rows = np.cumsum(steps, axis=1) % 7  # each token is 1 or 2 above the previous token
    loss = bigram.bigram_loss(rows[:50], rows[50:], vocab_size=7)
    entropy = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    assert loss == pytest.approx(entropy, abs=0.05)
    table = bigram.smoothed(bigram.bigram_counts(rows, vocab_size=7), strength=3.0)
    np.testing.assert_allclose(np.exp(table).sum(1), 1)
    assert bigram.bigram_loss(rows[:1], rows[50:], vocab_size=7) < np.log(50)  # hardly any training data


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of c4 and arxiv: 400 numbered texts per split, just over a block each."""
    root = tmp_path_factory.mktemp("numbered")
    for split in ("train", "validation"):
        lines = [row(d, f"{split[0]}{i:03d} " * 7) for i in range(400) for d in ("c4", "arxiv")]
        write_shard(root / "source" / split / "a.jsonl.zst", lines)
    prepare.prepare(str(root / "source"), root / "out", tokenizer="byte", seq_len=T, workers=1)
    return root / "out"


def document_numbers(corpus: Corpus, rows: np.ndarray, split: str) -> list[int]:
    """Return the sorted document numbers, one per block."""
    matches = [re.findall(rf"{split}(\d\d\d) ", corpus.tokenizer.decode(r)) for r in rows]
    return sorted(int(numbers[0]) for numbers in matches if numbers)


@pytest.mark.parametrize("count", [20, 150])
@pytest.mark.parametrize("domain", ["c4", "arxiv"])
def test_evaluation_blocks_cover_the_domain(numbered: Path, domain: str, count: int):
    """Every quarter of the documents is represented, and the mean is central."""
    corpus = open_blocks(numbered, train_domains=("c4",), eval_domains=("c4", "arxiv"))
    for seed in (0, 1):
        rows = corpus.eval_blocks(domain, count=count, seed=seed).tokens
        picked = document_numbers(corpus, rows, "v" if domain == "c4" else "[vt]")
        assert len({r.tobytes() for r in rows}) == len(picked) == count
        per_quarter = np.histogram(picked, bins=4, range=(0, 400))[0]
        assert min(per_quarter) >= count / 4 / 4
        assert abs(np.mean(picked) - 199.5) < 4 * 400 / math.sqrt(12 * count)


@pytest.mark.parametrize("count", [10, 150])
def test_train_sample_is_evenly_spaced(numbered: Path, count: int):
    """No gap, including both ends, exceeds 2.5 times the average."""
    corpus = open_blocks(numbered, train_domains=("c4",), eval_domains=("c4",))
    rows = corpus.train_sample("c4", count=count)
    picked = document_numbers(corpus, rows, "t")
    assert len({r.tobytes() for r in rows}) == len(picked) == count
    assert max(np.diff([0, *picked, 399])) <= 2.5 * 400 / count


def reference_bigram_losses(train: np.ndarray, test: np.ndarray, vocab_size: int) -> dict[float, float]:
    """Return the loss in nats per token by smoothing strength, in a plain loop."""
    pairs: Counter[tuple[int, int]] = Counter()
    for block in train.tolist():
        pairs.update(itertools.pairwise(block))
    follows, leads = Counter(), Counter()
    for (a, b), n in pairs.items():
        leads[a] += n
        follows[b] += n
    total = sum(follows.values())
    losses = {}
    for k in bigram.STRENGTHS:
        nats = [
            -math.log((pairs[a, b] + k * (follows[b] + 1) / (total + vocab_size)) / (leads[a] + k))
            for block in test.tolist()
            for a, b in itertools.pairwise(block)
        ]
        losses[k] = sum(nats) / len(nats)
    return losses


def test_corpus_bigram_loss_equals_a_plain_loop(blocks_dir: Path):
    """The strength comes from a held-out tenth, and only in-domain text is tested."""
    corpus = open_blocks(blocks_dir)
    assert corpus.in_domain == set(corpus.train_domains) < set(corpus.eval_domains)
    max_tokens = 50 * T
    train = np.concatenate([corpus.train_sample(d, count=10**6) for d in corpus.train_domains])
    tests = {d: corpus.eval_blocks(d, count=50).tokens for d in corpus.eval_domains}
    inside = np.concatenate([rows for d, rows in tests.items() if d in corpus.in_domain])
    loss = corpus.bigram_loss(max_tokens=max_tokens)
    assert loss is not None
    shuffled = np.random.default_rng(1).permutation(train)
    tenth = len(shuffled) // 10
    on_held_out = reference_bigram_losses(shuffled[:-tenth], shuffled[-tenth:], 258)
    strength = min(on_held_out, key=on_held_out.__getitem__)
    losses = reference_bigram_losses(train, inside, 258)
    assert loss == pytest.approx(losses[strength], rel=1e-9)
    mixed = reference_bigram_losses(train, np.concatenate(list(tests.values())), 258)
    assert min(abs(x - loss) for x in mixed.values()) > 1e-3, "OOD text must change the loss"
    corpus.tokenizer = type("Large", (), {"vocab_size": 32_000})()
    assert corpus.bigram_loss() is None


def test_missing_and_damaged_directories_are_refused(tmp_path: Path, blocks_dir: Path):
    with pytest.raises(UserError, match=r"config\.data\.path: no directory .*absent"):
        open_blocks(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no manifest\.json"):
        open_blocks(tmp_path)
    (tmp_path / ".parts").mkdir()
    with pytest.raises(UserError, match="unfinished"):
        open_blocks(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(blocks_dir, copy)
    (copy / "train" / "c4-00000.array_record").unlink()
    with pytest.raises(UserError, match=r"c4-00000\.array_record is missing"):
        open_blocks(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json.* damaged"):
        open_blocks(copy)
    (copy / "manifest.json").write_text(json.dumps({"format": 1, "splits": {"train": {"c4": {"files": [{}]}}}}))
    with pytest.raises(UserError, match=r"manifest\.json.* damaged"):
        open_blocks(copy)
    (copy / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        open_blocks(copy)


def damaged(source: Path, to: Path, change) -> Path:
    """Copy blocks, change the c4 file, and adjust the manifest to its new length."""
    shutil.copytree(source, to)
    file = to / "train" / "c4-00000.array_record"
    file.write_bytes(change(file.read_bytes()))
    return measured(to)


def measured(directory: Path) -> Path:
    """Set the c4 sizes in the manifest; remove checksums, as in earlier versions."""
    content = json.loads((directory / "manifest.json").read_text())
    for file in content["splits"]["train"]["c4"]["files"]:
        file["bytes"] = (directory / file["path"]).stat().st_size
        file.pop("sampled", None)
    (directory / "manifest.json").write_text(json.dumps(content))
    return directory


def test_blocks_from_before_0_1_0_are_refused(tmp_path: Path, blocks_dir: Path):
    """They lack document lengths; still earlier versions also lack file sizes."""
    copy = tmp_path / "copy"
    shutil.copytree(blocks_dir, copy)
    (copy / "documents.npz").unlink()
    with pytest.raises(UserError, match=r"documents\.npz .*0\.1\.0"):
        open_blocks(copy)
    content = json.loads((copy / "manifest.json").read_text())
    del content["splits"]["train"]["c4"]["files"][0]["bytes"]
    (copy / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"manifest\.json .*0\.1\.0"):
        open_blocks(copy)


@pytest.mark.parametrize("kind", ["cut", "zeros", "a bit", "empty", "other blocks"])
def test_damaged_blocks_are_refused(tmp_path: Path, blocks_dir: Path, kind: str):
    """Both in training batches, read by Grain's threads, and in evaluation."""
    change = {
        "cut": lambda x: x[: len(x) // 2],
        "zeros": lambda x: x[:-70_000] + bytes(70_000) if len(x) > 140_000 else bytes(len(x)),
        "a bit": lambda x: x[: len(x) // 2] + bytes([x[len(x) // 2] ^ 4]) + x[len(x) // 2 + 1 :],
        "empty": lambda x: b"",
        "other blocks": lambda x: x,
    }[kind]
    copy = damaged(blocks_dir, tmp_path / "copy", change)
    if kind == "other blocks":
        rows = np.full((50, T + 9), 65, np.uint16)
        blocks.write_records(copy / "train" / "c4-00000.array_record", iter([rows]))
        measured(copy)
    corpus = open_blocks(copy, train_domains=("commoncrawl", "c4"))
    with pytest.raises(UserError, match=r"train/c4-00000\.array_record .*damaged, block \d+: "):
        iterator = corpus.train_iterator(batch_size=8)
        for _ in range(200):
            next(iterator)
    corpus = open_blocks(copy, train_domains=("commoncrawl",), eval_domains=("c4",))
    with pytest.raises(UserError, match=r"train/c4-00000\.array_record .*damaged, block \d+: "):
        corpus.eval_blocks("c4", count=10**6)


def test_wrong_file_size_is_refused_at_opening(tmp_path: Path, blocks_dir: Path):
    copy = tmp_path / "copy"
    shutil.copytree(blocks_dir, copy)
    file = copy / "train" / "c4-00000.array_record"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"c4-00000\.array_record is damaged: .*{size - 1}\b.*{size}\b"):
        open_blocks(copy)


def test_out_of_range_ids_are_refused(tmp_path: Path, blocks_dir: Path):
    """Without this check the loss is NaN, as after a divergence."""
    copy = tmp_path / "copy"
    shutil.copytree(blocks_dir, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (entry,) = manifest["splits"]["train"]["c4"]["files"]
    rows = np.full((entry["blocks"], T + 1), 65, np.uint16)
    rows[:7, 5], rows[7, 5] = 257, 258  # the largest valid id, and the first invalid id
    blocks.write_records(copy / entry["path"], iter([rows]))
    entry["bytes"] = (copy / entry["path"]).stat().st_size
    del entry["sampled"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    iterator = open_blocks(copy).train_iterator(batch_size=8)
    with pytest.raises(UserError, match=r"c4-00000\.array_record .*block 7: id 258 "):
        for _ in range(200):
            next(iterator)


@pytest.mark.parametrize("path", ["../c4-00000.array_record", "/etc/passwd", "train/../../x/c4.array_record"])
def test_manifest_paths_must_stay_in_the_directory(tmp_path: Path, blocks_dir: Path, path: str):
    copy = tmp_path / "copy"
    shutil.copytree(blocks_dir, copy)
    (tmp_path / "c4-00000.array_record").touch()
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["splits"]["train"]["c4"]["files"][0]["path"] = path
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=re.escape(f"manifest.json names {path}")):
        open_blocks(copy)


def test_blocks_that_do_not_fit_the_config_are_refused(blocks_dir: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"config\.train\.seq_len=64 .*config\.train\.seq_len=32"):
        open_blocks(blocks_dir, seq_len=64)
    with pytest.raises(UserError, match=r"258 ids.*config\.model\.vocab_size"):
        open_blocks(blocks_dir, vocab_size=257)
    with pytest.raises(UserError, match=r"config\.data\.eval_domains: 'arxive' .*'arxiv'"):
        open_blocks(blocks_dir, eval_domains=("arxive",))
    with pytest.raises(UserError, match=r"config\.data\.tokenizer_path"):
        open_blocks(blocks_dir, tokenizer_path="some.model")
    with pytest.raises(UserError, match=r"config\.data\.train_domains .*c4, c4"):
        open_blocks(blocks_dir, train_domains=("c4", "c4"))
    monkeypatch.setattr("seqjax.data.tokenizer.ByteTokenizer.hash", "0" * 64)
    with pytest.raises(UserError, match=r"byte tokenizer .*config\.data\.tokenizer"):
        open_blocks(blocks_dir)


def test_absent_domains_are_refused(tmp_path: Path):
    rng = np.random.default_rng(0)
    for split in ("train", "validation"):
        lines = [row(domain, some_text(rng, 30)) for domain in ("c4", "commoncrawl") for _ in range(20)]
        write_shard(tmp_path / "source" / split / "a.jsonl.zst", [*lines, row("book", "short")])
    out = tmp_path / "out"
    prepare.prepare(str(tmp_path / "source"), out, tokenizer="byte", seq_len=T, workers=1)
    with pytest.raises(UserError, match=r"arxiv, github, stackexchange.*config\.data\.eval_domains"):
        open_blocks(out)
    with pytest.raises(UserError, match=r"no train .*book.*config\.data\.train_domains.*c4, commoncrawl"):
        open_blocks(out, regime="mixed")
    assert open_blocks(out, eval_domains=("c4",)).in_domain == {"c4"}


def test_in_domain_evaluation_needs_validation_text(tmp_path: Path):
    rng = np.random.default_rng(0)
    write_shard(tmp_path / "source" / "train" / "a.jsonl.zst", [row("c4", some_text(rng, 90)) for _ in range(20)])
    out = tmp_path / "out"
    prepare.prepare(str(tmp_path / "source"), out, tokenizer="byte", seq_len=T, workers=1)
    with pytest.raises(UserError, match=r"'c4' .*33 tokens.*validation.*eval_domains"):
        open_blocks(out, train_domains=("c4",), eval_domains=("c4",))


def test_open_file_limit_is_raised(monkeypatch: pytest.MonkeyPatch):
    resource = pytest.importorskip("resource")
    calls = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: calls.append(limits))
    blocks.allow_open_files(100)
    blocks.allow_open_files(3000)
    assert calls == [(3512, 4096)]
    with pytest.raises(UserError, match="ulimit -Hn"):
        blocks.allow_open_files(5000)
