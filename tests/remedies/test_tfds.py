"""The remedies for datasets of tensorflow-datasets: their names, splits, features and files."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqjax.config import DataConfig
from seqjax.data import open_corpus
from seqjax.data.prepare import __main__ as command
from seqjax.data.sources import tfds as source
from tests import extras
from tests.remedies.follow import Remedy, follow, write

tfds: Any = extras.package("tensorflow_datasets")
NAME = "remedy_news"  # the package finds the class by this name, as it finds its own datasets


class RemedyNews(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    url_infos = None

    def _info(self) -> Any:
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"title": text, "body": text}))

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        return {split: self._generate_examples() for split in ("train", "validation")}

    def _generate_examples(self) -> Any:
        for i in range(20):
            yield i, {"title": f"a title that is long enough {i}", "body": f"a body that is long enough {i}"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("datasets")
    tfds.builder(NAME, data_dir=str(root), file_format=source.FORMAT).download_and_prepare()
    return root


def _open(root: Path, name: str | tuple[str, ...] = NAME, path: str = "data", **settings: Any) -> None:
    names = name if isinstance(name, tuple) else (name,)
    settings = {"tfds_feature": "body", "path": path if "://" in path else str(root / path)} | settings
    if len(names) > 1:
        settings["regime"] = "mixed"
    open_corpus(DataConfig(corpus="tfds", tokenizer="byte", tfds=names, **settings), seq_len=16, vocab_size=264)


def _named(root: Path, name: str) -> None:
    source.dataset_directories([name], root / "data")


def _feature(_: Path, name: str) -> None:
    features = {"numbers": {"n": tfds.features.Scalar(np.int64)}, NAME: {"body": tfds.features.Text()}}
    source._text_feature(tfds.features.FeaturesDict(features[name]), "", name=name)


def _build(root: Path, match: re.Match[str]) -> None:
    """Run the Python code in the message."""
    del root
    exec(match["code"], {"tfds": tfds})


def _build_again(root: Path, match: re.Match[str]) -> None:
    shutil.rmtree(match["path"])
    tfds.builder(NAME, data_dir=str(root / "data"), file_format=source.FORMAT).download_and_prepare()


def _put_back(root: Path, match: re.Match[str]) -> None:
    path = Path(match["path"])
    shutil.copy(root / "copy" / path.relative_to(root / "data"), path)


def _file(root: Path) -> Path:
    return next((root / "data" / NAME / "1.0.0").glob("*train*"))


def _cut(root: Path, _: pytest.MonkeyPatch) -> None:
    content = bytearray(_file(root).read_bytes())
    content[len(content) // 3 : len(content) // 3 * 2] = bytes(len(content) // 3)
    _file(root).write_bytes(content)


def _config(root: Path, _: pytest.MonkeyPatch) -> None:
    """Make a dataset with the config `one`."""
    shutil.copytree(root / "data" / NAME / "1.0.0", root / "data" / "parts" / "one" / "1.0.0")


def _of_tensorflow(root: Path, _: pytest.MonkeyPatch) -> None:
    info = root / "data" / NAME / "1.0.0" / source.INFO
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fileFormat": "tfrecord"}))


def _to(_: Path, match: re.Match[str]) -> dict[str, str]:
    return {"name": match["to"]}


CODE = "`(?P<code>tfds.builder[^`]+)`"
DATASETS: dict[str, Remedy] = {
    "a store": Remedy(
        _open, {"path": "gs://b/data"}, r"config\.data\.(?P<key>path)=.*copy the datasets", lambda *_: {"path": "data"}
    ),
    "no directory": Remedy(
        _open, {"path": "dta"}, r"config\.data\.(?P<key>path): .*give the data directory", lambda *_: {"path": "data"}
    ),
    "two datasets of a domain": Remedy(
        _open,
        {"name": (NAME, NAME)},
        r"write '(?P<to>DOMAIN=\w+)' for one of them, with another DOMAIN",
        lambda _, match: {"name": (NAME, match["to"].replace("DOMAIN", "other"))},
    ),
    "two configs of a domain": Remedy(
        _open,
        {"name": ("one=parts", "one=parts")},
        r"write '(?P<to>DOMAIN=parts/one)' for one of them, with another DOMAIN",
        lambda _, match: {"name": ("one=parts", match["to"].replace("DOMAIN", "other"))},
        _config,
    ),
    "a misspelt dataset": Remedy(_named, {"name": "remedy_new"}, r"Did you mean '(?P<to>\w+)'", _to),
    "a dataset that is not built": Remedy(
        _open, {"path": "empty"}, CODE, _build, lambda root, _: (root / "empty").mkdir()
    ),
    "a dataset that is not complete": Remedy(
        _open,
        {},
        rf"(?P<path>\S+) holds no complete dataset.*Move it away.*{CODE}",
        lambda root, match: [Path(match["path"]).rename(root / "away"), _build(root, match)],
        lambda root, _: (root / "data" / NAME / "1.0.0" / source.INFO).unlink(),
    ),
    "a config of a dataset without": Remedy(_named, {"name": f"{NAME}/x"}, r"write '(?P<to>\w+)' without /x", _to),
    "a misspelt config": Remedy(
        _named,
        {"name": "parts/on"},
        r"Did you mean '(?P<to>\w+)'",
        lambda _, match: {"name": f"parts/{match['to']}"},
        _config,
    ),
    "another version": Remedy(
        _named,
        {"name": f"{NAME}:2.0.0"},
        r"no version 2.0.0 of \S+, which has (?P<to>[\d.]+\d)",
        lambda _, match: {"name": f"{NAME}:{match['to']}"},
    ),
    "another split": Remedy(
        _open,
        {"tfds_train_split": "dev"},
        r"config\.data\.(?P<key>tfds_train_split)='dev': .* the splits (?P<to>\w+)",
        lambda _, match: {match["key"]: match["to"]},
    ),
    "a split, a slice": Remedy(
        _open,
        {"tfds_train_split": "dev"},
        r"config\.data\.(?P<key>tfds_train_split)=.* or a slice such as '(?P<to>[^']+)'",
        lambda _, match: {match["key"]: match["to"]},
    ),
    "an empty slice": Remedy(
        _open,
        {"tfds_train_split": "train[:0]"},
        r"config\.data\.(?P<key>tfds_train_split)=.* give another slice",
        lambda _, match: {match["key"]: "train[:90%]"},
    ),
    "another feature": Remedy(
        _open,
        {"tfds_feature": "text"},
        r"config\.data\.(?P<key>tfds_feature)=.* has the texts (?P<to>\w+).*give one of them",
        lambda _, match: {match["key"]: match["to"]},
    ),
    "several features": Remedy(
        _open,
        {"tfds_feature": ""},
        r"has the texts (?P<to>\w+).*say which in config\.data\.(?P<key>tfds_feature)",
        lambda _, match: {match["key"]: match["to"]},
    ),
    "no text": Remedy(_feature, {"name": "numbers"}, r"give another in config\.data\.tfds", lambda *_: {"name": NAME}),
    "a file of TensorFlow": Remedy(
        _open,
        {},
        rf"^(?P<path>\S+) has the file format tfrecord.*delete it.*{CODE}",
        lambda root, match: [shutil.rmtree(match["path"]), _build(root, match)],
        _of_tensorflow,
    ),
    "damaged features": Remedy(
        _open,
        {},
        "^(?P<path>\\S+) cannot be read .*; delete it, and build the dataset again",
        _build_again,
        lambda root, _: write(root / "data" / NAME / "1.0.0" / "features.json", "{"),
    ),
    "a missing file": Remedy(
        _open, {}, "^(?P<path>\\S+) is missing: put back a copy", _put_back, lambda root, _: _file(root).unlink()
    ),
    "a missing file, built again": Remedy(
        _open, {}, "or delete (?P<path>\\S+) and build it again", _build_again, lambda root, _: _file(root).unlink()
    ),
    "a damaged file": Remedy(_open, {}, "^(?P<path>\\S+) is damaged.*Put back a copy", _put_back, _cut),
    "a damaged file, built again": Remedy(_open, {}, "or delete (?P<path>\\S+) and build it again", _build_again, _cut),
}


@pytest.mark.parametrize("name", DATASETS)
def test_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Path, name: str):
    for copy in ("data", "copy"):
        shutil.copytree(built, tmp_path / copy)
    follow(DATASETS[name], tmp_path, monkeypatch)


@pytest.mark.parametrize("instead", ["settings", "command"])
def test_the_command_that_built_slim_pajama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead: str):
    for split in ("train", "validation"):
        write(tmp_path / "shards" / split / "c4" / "a.jsonl", '{"text": "hello world, hello world"}\n' * 9)

    def removed(_: Path, words: Callable[[], Any] | None = None) -> None:
        words() if words else source.main([])

    def settings(match: re.Match[str]) -> Callable[[], Any]:
        values = dict(re.findall(r"--config\.data\.(\w+)=(\w+)", match["settings"]))
        assert values.pop("path") == "SHARDS"
        domains = {"train_domains": ("c4",), "eval_domains": ("c4",)}
        config = DataConfig(path=str(tmp_path / "shards"), tokenizer="byte", **values, **domains)
        return lambda: open_corpus(config, seq_len=16, vocab_size=264)

    def prepared(match: re.Match[str]) -> Callable[[], Any]:
        text = match["command"].replace("SHARDS", f"{tmp_path}/shards").replace("DIR", f"{tmp_path}/out")
        assert shlex.split(text)[:2] == ["seqjax", "prepare"]
        return lambda: command.main([*shlex.split(text)[2:], "--seq_len=16", "--workers=1"])

    remedy = Remedy(
        removed,
        {},
        r"(?P<settings>--config.data.corpus=\w+ --config.data.path=\w+), .*`(?P<command>seqjax prepare [^`]+)`",
        lambda _, match: {"words": {"settings": settings, "command": prepared}[instead](match)},
    )
    follow(remedy, tmp_path, monkeypatch)
