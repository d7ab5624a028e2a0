"""Real tensorflow-datasets directories, streamed and prepared as blocks."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from seqjax.commands import evaluate
from seqjax.config import DataConfig
from seqjax.data import Corpus, hold_out, open_corpus
from seqjax.data.layout import Layout
from seqjax.data.sources import tfds as source
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import MissingPackageError, UserError
from seqjax.training.loop import train
from tests import extras, support
from tests.chaos.kills import fingerprint

from .conftest import assert_resumes, prepared, some_text, write_corpus

tfds: Any = extras.package("tensorflow_datasets")

T = 32
DOMAINS = ("commoncrawl", "c4", "arxiv")
TOKENIZER = ByteTokenizer()


def build_slim(root: Path, domain: str, texts: dict[str, list[str]]) -> None:
    """Build a `slim_pajama` config as earlier versions did; `texts` is by split."""

    with tfds.core.registered.skip_registration():

        class SlimPajama(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")
            BUILDER_CONFIGS = (tfds.core.BuilderConfig(name=domain),)
            url_infos = None

            def _info(self):
                features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
                return tfds.core.DatasetInfo(builder=self, features=features)

            def _split_generators(self, dl_manager):
                return {split: self._generate_examples(of_split) for split, of_split in texts.items()}

            def _generate_examples(self, of_split):
                for i, text in enumerate(of_split):
                    yield i, {"text": text}

    builder = SlimPajama(config=domain, data_dir=str(root), file_format="array_record")
    builder.download_and_prepare(download_dir=str(root / ".downloads"))


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory: three domains of `slim_pajama`, and other datasets."""
    root = tmp_path_factory.mktemp("datasets")
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        texts = {
            split: [f"{domain} {split} {i} {some_text(rng, int(rng.integers(1, 40)))}" for i in range(n)]
            for split, n in (("train", 40), ("validation", 20))
        }
        build_slim(root, domain, texts)

    class NewsItems(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.2.0")
        url_infos = None

        def _info(self):
            text = tfds.features.Text()
            features = {"title": text, "body": {"en": text, "n": np.int64}}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(200):
                body = {"en": b"\xff\xfe" if i == 7 else " " if i == 8 else f"body {i}", "n": i}
                yield i, {"title": f"title {i}", "body": body}

    for version, form in (("1.2.0", "array_record"), ("1.10.0", "array_record"), ("2.0.0", "tfrecord")):
        NewsItems.VERSION = tfds.core.Version(version)
        if form == "array_record":
            NewsItems(data_dir=str(root), file_format=form).download_and_prepare(download_dir=str(root / ".downloads"))
        else:
            # Writing tfrecord needs TensorFlow, so only the metadata of a copy declares it.
            shutil.copytree(root / "news_items" / "1.10.0", root / "news_old" / version)
            info = root / "news_old" / version / "dataset_info.json"
            changed = json.loads(info.read_text()) | {"fileFormat": form, "name": "news_old", "version": version}
            info.write_text(json.dumps(changed))
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def open_tfds(datasets: Path, cache: str, *names: str, seq_len: int = T, vocab_size: int = 258, **settings) -> Corpus:
    config = DataConfig(corpus="tfds", tfds=names or ("slim_pajama",), path=str(datasets), cache_dir=cache, **settings)
    return open_corpus(config, seq_len=seq_len, vocab_size=vocab_size)


def open_slim(datasets: Path, cache: str, **settings) -> Corpus:
    chosen = {"train_domains": ("commoncrawl", "c4"), "eval_domains": DOMAINS} | settings
    return open_tfds(datasets, cache, **chosen)


def in_order(directory: Path, split: str, *path: str) -> list[str]:
    """Return the texts of a dataset in order, as tensorflow-datasets reads them."""
    texts = []
    for example in tfds.builder_from_directory(str(directory)).as_data_source(split):
        for part in path or ("text",):
            example = example[part]
        texts.append(example.decode("utf-8", "replace"))
    return texts


def joined(texts: list[str]) -> np.ndarray:
    return np.concatenate([[TOKENIZER.bos, *text.encode(), TOKENIZER.eos] for text in texts])


# -------------------------------------------------------------------------------------------------------------- corpus
def test_evaluation_tokens_equal_the_documents(datasets: Path, cache: str):
    """In domain: the validation split. OOD: validation, then train."""
    corpus = open_slim(datasets, cache)
    for domain, splits in (("c4", ("validation",)), ("arxiv", ("validation", "train"))):
        evaluation = corpus.eval_blocks(domain, count=10_000)
        rows, owners = [], []
        for i, split in enumerate(splits):
            texts = in_order(datasets / "slim_pajama" / domain / "1.0.0", split)
            stream = joined(texts)
            n_blocks = len(stream) // (T + 1)
            rows.append(stream[: n_blocks * (T + 1)].reshape(n_blocks, -1))
            owner = np.repeat(np.arange(len(texts)), [len(text.encode()) + 2 for text in texts])
            of_block = owner[: n_blocks * (T + 1)].reshape(n_blocks, -1)
            owners += [(i << 32) + np.bincount(block).argmax() for block in of_block]
        np.testing.assert_array_equal(evaluation.tokens, np.concatenate(rows))
        np.testing.assert_array_equal(evaluation.documents, owners)
        assert evaluation.n_bytes.sum() == (evaluation.tokens[:, 1:] < 256).sum()


def test_epoch_contains_every_document_once(datasets: Path, cache: str):
    corpus = open_tfds(datasets, cache, "slim_pajama/c4", seq_len=7)
    assert corpus.train_domains == corpus.eval_domains == ("c4",)
    texts = in_order(datasets / "slim_pajama" / "c4" / "1.0.0", "train")
    total = len(joined(texts))
    iterator = corpus.train_iterator(batch_size=1)
    stream = np.concatenate([next(iterator)["tokens"][0] for _ in range(2 * total // 8 + 1)])
    iterator.close()
    first, second = stream[:total], stream[total : 2 * total]
    for epoch in (first, second):
        np.testing.assert_array_equal(np.bincount(epoch, minlength=258), np.bincount(joined(texts), minlength=258))
    assert first.tolist() != second.tolist()


def test_default_shares_are_byte_shares(datasets: Path, cache: str):
    corpus = open_slim(datasets, cache)
    files = [next((datasets / "slim_pajama" / domain).rglob("*-train.array_record*")) for domain in DOMAINS[:2]]
    sizes = [file.stat().st_size for file in files]
    assert corpus.weights["c4"] == pytest.approx(sizes[1] / sum(sizes), rel=5e-3)
    assert open_slim(datasets, cache, weights=(3.0, 1.0)).weights == {"commoncrawl": 0.75, "c4": 0.25}


def test_resume_is_exact_at_every_batch(datasets: Path, cache: str, manager: ocp.CheckpointManager):
    corpus = open_slim(datasets, cache)
    assert_resumes(manager, lambda: corpus.train_iterator(batch_size=3), points=20, after=3)


@pytest.mark.slow  # starts two processes
def test_resume_with_workers_is_exact(datasets: Path, cache: str, manager: ocp.CheckpointManager):
    corpus = open_slim(datasets, cache, workers=2)
    assert_resumes(manager, lambda: corpus.train_iterator(batch_size=3), points=2, after=3)


def test_hash_depends_on_content_not_directory(datasets: Path, cache: str, tmp_path: Path):
    """The hash depends on splits, features and block length, not on the directory."""
    first = open_tfds(datasets, cache, "slim_pajama/c4").manifest_hash
    shutil.copytree(datasets / "slim_pajama" / "c4", tmp_path / "slim_pajama" / "c4")
    assert open_tfds(tmp_path, cache, "slim_pajama/c4").manifest_hash == first
    changes: list[dict[str, Any]] = [
        {"seq_len": 16},
        {"tfds_train_split": "train[:80%]"},
        {"tfds_validation_split": "train[80%:]"},
    ]
    changed_hashes = [open_tfds(datasets, cache, "slim_pajama/c4", **change).manifest_hash for change in changes]
    assert len({first, *changed_hashes}) == 4


def test_datasets_are_prepared(datasets: Path, tmp_path: Path):
    """All configs of a dataset, then one without configs and with `text_field`."""
    manifest = prepared(datasets / "slim_pajama", tmp_path / "slim")
    counted = {f"{split}/{d}": e["documents"] for split, of in manifest["splits"].items() for d, e in of.items()}
    assert counted == {
        f"{split}/{domain}": len(in_order(datasets / "slim_pajama" / domain / "1.0.0", split))
        for split in ("train", "validation")
        for domain in DOMAINS
    }
    config = DataConfig(
        corpus="blocks", path=str(tmp_path / "slim"), train_domains=("c4",), eval_domains=("c4", "arxiv")
    )
    corpus = open_corpus(config, seq_len=16, vocab_size=258)
    stream = joined(in_order(datasets / "slim_pajama" / "c4" / "1.0.0", "validation"))
    tokens = corpus.eval_blocks("c4", count=10_000).tokens
    np.testing.assert_array_equal(tokens.ravel(), stream[: tokens.size])
    manifest = prepared(datasets / "news_items", tmp_path / "news", layout=Layout(text_field="body.en"))
    held = manifest["splits"]["validation"]["news_items"]["documents"]
    assert manifest["splits"]["train"]["news_items"]["documents"] == 198 - held
    assert held > 0
    assert manifest["skipped"]["by_reason"] == {"empty document": 1, "not UTF-8": 1}
    one = prepared(datasets / "news_items" / "1.2.0", tmp_path / "one", layout=Layout("title", domain="news"))
    assert {domain for of in one["splits"].values() for domain in of} == {"news"}
    with pytest.raises(UserError, match=r"news_old/2\.0\.0 .*tfrecord"):
        prepared(datasets / "news_old", tmp_path / "old")


def test_prepare_holds_out_documents_by_hash(tmp_path: Path):
    """Documents are held out of the train split only; the test split is unchanged."""
    sizes = {"train": 400, "test": 60}
    build_slim(tmp_path, "c4", {split: [f"{split} {i} words" for i in range(n)] for split, n in sizes.items()})
    manifest = prepared(tmp_path / "slim_pajama", tmp_path / "out")
    documents = {split: of["c4"]["documents"] for split, of in manifest["splits"].items()}
    trained = in_order(tmp_path / "slim_pajama" / "c4" / "1.0.0", "train")
    held = sum(hold_out.text_hash(text) < hold_out.SHARE * hold_out.HASHES for text in trained)
    assert documents == {"train": 400 - held, "validation": held, "test": 60}
    assert held >= 1


def test_dataset_directory_is_streamed(datasets: Path, cache: str):
    by_path = DataConfig(corpus="stream", path=str(datasets / "slim_pajama" / "c4"))
    by_name = open_tfds(datasets, cache, "slim_pajama/c4")
    evaluation = open_corpus(by_path, seq_len=T, vocab_size=258).eval_blocks("c4", count=9)
    np.testing.assert_array_equal(evaluation.tokens, by_name.eval_blocks("c4", count=9).tokens)


# ------------------------------------------------------------------------------------- datasets of other shapes
def news(datasets: Path, cache: str, name: str = "news_items", **settings) -> Corpus:
    return open_tfds(datasets, cache, name, **{"tfds_feature": "body.en", "seq_len": 16} | settings)


def test_stream_holds_out_documents_by_hash(datasets: Path, cache: str):
    corpus = news(datasets, cache)
    assert corpus.train_domains == ("news_items",)
    texts = [t for t in in_order(datasets / "news_items" / "1.10.0", "train", "body", "en") if t.startswith("body")]
    held = TOKENIZER.decode(corpus.eval_blocks("news_items", count=1000).tokens.ravel())
    expected = [text for text in texts if hold_out.text_hash(text) < hold_out.SHARE * hold_out.HASHES]
    assert len(expected) >= 2
    assert "".join(expected).startswith(held)
    trained = set(TOKENIZER.decode(corpus.train_sample("news_items", count=10**6).ravel()).split("body "))
    assert not trained & {text.removeprefix("body ") for text in expected}
    assert len(trained) > 100


def test_split_and_feature_settings(datasets: Path, cache: str):
    settings = {"tfds_train_split": "train[:70%]", "tfds_validation_split": "train[70%:]"}
    titles = news(datasets, cache, "daily=news_items:1.2.0", tfds_feature="title", **settings)
    assert titles.train_domains == ("daily",)
    texts = in_order(datasets / "news_items" / "1.2.0", "train", "title")
    trained = TOKENIZER.decode(titles.train_sample("daily", count=1000).ravel())
    assert "".join(texts[:140]).startswith(trained)
    held = TOKENIZER.decode(titles.eval_blocks("daily", count=1000).tokens.ravel())
    assert "".join(texts[140:]).startswith(held)


def test_named_datasets_are_mixed(datasets: Path, cache: str):
    corpus = open_tfds(datasets, cache, "slim_pajama/c4", "web=slim_pajama/arxiv", train_domains=("c4",))
    assert corpus.eval_domains == ("c4", "web")
    assert corpus.in_domain == {"c4"}


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (("slim_pyjama",), {}, "slim_pyjama in .*'slim_pajama'.*download_and_prepare"),
        (("slim_pajama/arxive",), {}, "slim_pajama/arxive .*'arxiv'.*corpus=stream"),
        (("slim_pajama/arxiv:3.0.0",), {}, r"3\.0\.0 of slim_pajama/arxiv.*1\.0\.0"),
        (("news_items/en",), {}, "news_items .*no configs"),
        (("empty",), {}, "empty .*dataset_info.json"),
        (("two words",), {}, r"'two words' is not \[DOMAIN=\]NAME"),
        (("A b=news_items",), {}, r"'A b=news_items' is not \[DOMAIN=\]NAME"),
        (("slim_pajama/c4", "c4=news_items"), {}, "config.data.tfds: .*'c4'"),
        (
            ("slim_pajama",),
            {"train_domains": ("c4",), "eval_domains": ("github",)},
            "of github, which config.data.regime='limited'",
        ),
        (("slim_pajama",), {}, "of github, stackexchange, which config.data.regime='limited'"),
        (("slim_pajama/c4", "x=slim_pajama/arxiv"), {}, "c4, x.*config.data.train_domains"),
        (("slim_pajama/c4",), {"tfds_feature": "body"}, "config.data.tfds_feature='body': slim_pajama/c4/1.0.0 "),
        (
            ("news_items",),
            {},
            r"1\.10\.0 .*body\.en, title.*config.data.tfds_feature",
        ),
        (("slim_pajama/c4",), {"tfds_train_split": "dev"}, "tfds_train_split='dev': .* train, validation"),
        (("slim_pajama/c4",), {"tfds_validation_split": "train[90%"}, "tfds_validation_split='train.90%'"),
        (("slim_pajama/c4",), {"tfds_train_split": "train[:0]"}, r"tfds_train_split='train\[:0\]': .*no document"),
        (("news_old",), {}, "news_old/2.0.0 .*tfrecord .*array_record.*download_and_prepare"),
        (("slim_pajama/c4",), {"seq_len": 10**6}, "1000001 tokens"),
        (("slim_pajama/c4",), {"path": "gs://bucket/data"}, "config.data.path='gs://bucket/data'"),
        (("slim_pajama/c4",), {"path": "/nowhere"}, "config.data.path: no directory /nowhere"),
    ],
)
def test_invalid_datasets_are_refused(datasets: Path, cache: str, names, settings, message: str):
    (datasets / "empty" / "1.0.0").mkdir(parents=True, exist_ok=True)
    settings = dict(settings)
    with pytest.raises(UserError, match=message):
        open_tfds(settings.pop("path", datasets), cache, *names, **settings)


def test_damaged_dataset_is_refused(datasets: Path, cache: str, tmp_path: Path):
    shutil.copytree(datasets / "news_items" / "1.2.0", tmp_path / "news_items" / "1.2.0")
    directory = tmp_path / "news_items" / "1.2.0"
    file = next(directory.glob("*.array_record*"))
    content = bytearray(file.read_bytes())
    content[1000:3000] = bytes(2000)
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"news_items/1\.2\.0/.* is damaged"):
        news(tmp_path, cache)
    file.unlink()
    with pytest.raises(UserError, match=r"array_record.* is missing"):
        news(tmp_path, cache)
    (directory / "features.json").write_text("{")
    with pytest.raises(UserError, match=r"news_items/1\.2\.0 cannot .*JSONDecodeError"):
        news(tmp_path, cache)


def test_missing_tfds_names_the_extra(monkeypatch: pytest.MonkeyPatch, datasets: Path, cache: str):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'seqjax\[tfds\]'"):
        open_slim(datasets, cache)
    with pytest.raises(MissingPackageError, match=r"pip install 'seqjax\[tfds\]'"):
        source.require()


# ---------------------------------------------------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def run(datasets: Path, cache: str, tmp_path_factory: pytest.TempPathFactory):
    """A workdir and its config: 30 steps, saved and evaluated at steps 15 and 30."""
    config = support.run_config(
        datasets,
        data__corpus="tfds",
        data__tfds=("slim_pajama",),
        data__cache_dir=cache,
        data__train_domains=("commoncrawl", "c4"),
        data__eval_domains=DOMAINS,
        train__steps=30,  # as in other tests, to reuse their compiled steps
        checkpoint__every=15,
        eval__every=15 * 8 * support.SEQ_LEN,
    )
    workdir = tmp_path_factory.mktemp("runs") / "run"
    assert train(config, workdir) is True
    return workdir, config


@pytest.mark.slow
def test_run_evaluates_every_domain(run):
    workdir, _ = run
    rows = support.rows(workdir)
    assert [r["step"] for r in rows if "eval/arxiv/loss" in r] == [15, 30]
    evaluate.main([f"--workdir={workdir}"])
    written = json.loads((workdir / "evaluation.json").read_text())
    for domain in DOMAINS:
        assert written["loss"][domain] == pytest.approx(rows[-1][f"eval/{domain}/loss"], rel=1e-6)
    assert "Streamed from tensorflow-datasets (slim_pajama)" in (workdir / "report.md").read_text()


@pytest.mark.slow
def test_run_resumes_exactly(run, tmp_path: Path):
    workdir, config = run
    later = tmp_path / "later"
    shutil.copytree(workdir, later)
    shutil.rmtree(later / "checkpoints" / "30")
    assert train(config, later) is True
    assert support.rows(later) == support.rows(workdir)
    assert support.checkpoint_steps(later) == [15, 30]
    assert fingerprint(later) == fingerprint(workdir)


def test_removed_command_names_its_replacements(tmp_path: Path):
    """Both replacements in the message read the shards."""
    with pytest.raises(UserError, match=r"slim_pajama.*corpus=stream.*seqjax prepare --source=SHARDS"):
        source.main(["--source=SHARDS", "--data_dir=data/tfds", "--domains=arxiv"])
    shards_dir = write_corpus(tmp_path / "shards")
    config = DataConfig(corpus="stream", path=str(shards_dir))
    assert "arxiv" in open_corpus(config, seq_len=T, vocab_size=258).eval_domains
    assert "arxiv" in prepared(shards_dir, tmp_path / "out")["splits"]["train"]
