"""The remedies for paths, URLs and stores, and for packages that are not installed."""

import importlib
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqjax import store
from seqjax.config import DataConfig
from seqjax.convert import directory, import_weights, tokenizer_files
from seqjax.data import stored_tokenizer, tokenizer
from seqjax.data.huggingface import HuggingFaceTokenizer
from seqjax.data.prepare import cluster
from seqjax.data.sources import parquet, tfds
from seqjax.data.tokenizer import ByteTokenizer, MixtralTokenizer
from seqjax.errors import UserError
from seqjax.evals import niah
from tests import extras
from tests.convert.cases import GOLDEN, config_of
from tests.remedies.follow import Remedy, follow, write

ROOT = Path(__file__).parent.parent.parent


def _location(_: Path, text: str) -> None:
    store.location(text)


def _workdir(root: Path, text: str) -> None:
    store.require_workdir(store.location(text.replace("ROOT", str(root))))


def _local(root: Path, text: str) -> None:
    store.local(text.replace("ROOT", str(root)), "--out")


def _read(root: Path, url: str) -> None:
    with store.reading(url.replace("ROOT", str(root))) as file:
        file.read()


def _to(_: Path, match: re.Match[str]) -> dict[str, str]:
    return {"text": match["to"]}


def _refused(name: str, error: Exception) -> Callable[..., None]:
    """Return a `start` that puts an object in a store, which raises `error` until the file "allowed" is there."""

    def start(root: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(store, "RETRY_SECONDS", ())
        store.write(f"memory://{root.name}/a", b"x")
        fs, _ = store.filesystem(f"memory://{root.name}/a")
        function = getattr(fs, name)

        def refused(*arguments: Any, **options: Any) -> Any:
            if not (root / "allowed").exists():
                raise error
            return function(*arguments, **options)

        patch.setattr(fs, name, refused)

    return start


def _allow(root: Path, _: re.Match[str]) -> None:
    write(root / "allowed", "")


def _object(root: Path, name: str = "a") -> None:
    store.download(f"memory://{root.name}/{name}", root / "copy")


def _package(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the package of a scheme be missing until the file "allowed" is there."""
    url_to_fs = store.fsspec.core.url_to_fs

    def needs(url: str) -> Any:
        if not (root / "allowed").exists():
            raise ImportError("Install gcsfs to access Google Storage")
        return url_to_fs("memory://x")

    patch.setattr(store, "_systems", {})
    patch.setattr(store.fsspec.core, "url_to_fs", needs)


def _copied(root: Path, _: re.Match[str]) -> dict[str, str]:
    write(root / "data", "x")
    return {"url": "file://ROOT/data"}


PATHS: dict[str, Remedy] = {
    "the character 0": Remedy(_location, {"text": "a\0b"}, "character 0; leave it out", lambda *_: {"text": "ab"}),
    "a name like a URL": Remedy(_location, {"text": "file:x"}, r"of this name is (?P<to>\./\S+)\.", _to),
    "a name of a user": Remedy(_location, {"text": "~nobody9/x"}, r"of this name is (?P<to>\./\S+)\.", _to),
    "a long name": Remedy(
        _location,
        {"text": "a" * 256},
        r"at most (?P<n>\d+) bytes; give a shorter one",
        lambda _, match: {"text": "a" * int(match["n"])},
    ),
    "a backslash": Remedy(
        _location,
        {"text": "runs\\x"},
        r"disagree about '(?P<mark>\\\\|\\)+' in a path; rename the directory",
        lambda *_: {"text": "runs-x"},
    ),
    "a pattern as a workdir": Remedy(
        _workdir,
        {"text": "runs*"},
        r"disagree about '(?P<mark>\*)' in a path; rename the directory",
        lambda _, match: {"text": "runs*".replace(match["mark"], "")},
    ),
    "a workdir in another store": Remedy(_workdir, {"text": "s3://b/x"}, r"in (?P<to>gs://BUCKET/PATH)\.", _to),
    "a workdir in another store, mounted": Remedy(
        _workdir, {"text": "s3://b/x"}, "mount the bucket and give the directory", lambda *_: {"text": "ROOT/b/x"}
    ),
    "a workdir above a bucket": Remedy(
        _workdir,
        {"text": "gs://b/../x"},
        r"--workdir=\S+: write the path without `\.` and `\.\.`",
        lambda *_: {"text": "gs://b/x"},
    ),
    "output in a store": Remedy(
        _local,
        {"text": "gs://b/x"},
        "--out=gs://b/x: this is written to a path of this machine; copy it to the store afterwards",
        lambda *_: {"text": "ROOT/x"},
    ),
    "a scheme that runs code": Remedy(_read, {"url": "reference://x"}, "Copy the data to a directory", _copied),
    "an unknown scheme": Remedy(_read, {"url": "s5://b/x"}, "Give a local path", _copied),
    "a package of a store": Remedy(
        lambda _: store.filesystem("gs://b/x"),
        {},
        r"pip install 'seqjax\[(?P<extra>gcs)\]'",
        lambda root, match: [_allow(root, match), _has(match["extra"], "gcsfs")],
        _package,
    ),
    "an object of another name": Remedy(
        _object,
        {"name": "b"},
        "/b does not exist, .*Check the name",
        lambda *_: {"name": "a"},
        _refused("size", OSError()),
    ),
    "an object without rights": Remedy(
        _object, {}, "Check the credentials", _allow, _refused("get_file", PermissionError("denied"))
    ),
    "a store that is gone": Remedy(
        _object, {}, "Check the network", _allow, _refused("get_file", ConnectionError("refused"))
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    follow(PATHS[name], tmp_path, monkeypatch)


def test_a_locale_without_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Python decodes an argument as the environment says; the message names a variable for it."""

    def attempt(_: Path, **environment: str) -> None:
        code = "import sys; sys.stdout.write(ascii(sys.argv[1]))"
        command = [sys.executable, "-S", "-c", code, "caf\u00e9"]
        clean = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
        completed = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
        store.location(eval(completed.stdout))

    for name, value in (("PYTHONUTF8", "1"), ("LC_ALL", r"C\.UTF-8")):
        remedy = Remedy(
            attempt,
            {},
            rf"\b(?P<name>{name})=(?P<value>{value})",
            lambda _, match: {match["name"]: match["value"]},
        )
        follow(remedy, tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------------------------ packages
def _has(extra: str, package: str) -> None:
    """Check that an extra installs a package, directly or by another extra."""
    extras_of = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages: set[str] = set()
    for requirement in extras_of[extra]:
        packages.add(re.split(r"[\[<>=; ]", requirement)[0].replace("_", "-").lower())
    assert package.replace("_", "-").lower() in packages


def _stored(root: Path) -> None:
    """Encode text by the tokenizer that is stored with blocks where its package is missing."""
    try:
        MixtralTokenizer("none")
    except UserError as error:
        path = root / stored_tokenizer.FILE
        stored_tokenizer.write(path, ByteTokenizer())
        if "pip install" in str(error):
            stored_tokenizer.read(path, why=str(error)).encode("a")


def _tokenizer(root: Path) -> None:
    for name, content in tokenizer_files.files_of(DataConfig(tokenizer="byte"), max_length=None).items():
        (root / name).write_bytes(content)
    HuggingFaceTokenizer(root)


def _harness(root: Path) -> None:
    from seqjax.evals.lm_eval import __main__ as harness

    try:
        harness._run(types.SimpleNamespace(tasks=["none"], include=[str(root / "none")]), root)
    except UserError as error:
        if "--include" not in str(error):  # the next error: no directory of tasks
            raise


def _hub(_: Path) -> None:
    try:
        directory.fetched("hf://OWNER/NAME")
    except UserError as error:
        if "could not be fetched" not in str(error):  # the next error: no network
            raise


PACKAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], str]] = {
    # An attempt; the modules that it needs; the distribution of the first.
    "safetensors": (
        lambda _: import_weights(GOLDEN / "llama", config_of("llama")),
        ("safetensors", "safetensors.numpy"),
        "safetensors",
    ),
    "huggingface_hub": (_hub, ("huggingface_hub",), "huggingface_hub"),
    "pyarrow": (lambda _: parquet.Parquet.require(), ("pyarrow", "pyarrow.parquet"), "pyarrow"),
    "distributed": (lambda _: cluster.require(), ("distributed",), "distributed"),
    "tensorflow_datasets": (lambda _: tfds.require(), ("tensorflow_datasets",), "tensorflow-datasets"),
    "sentencepiece": (_stored, ("sentencepiece",), "sentencepiece"),
    "mistral_common": (lambda _: tokenizer._shipped_model(), ("mistral_common",), "mistral-common"),
    "tokenizers": (_tokenizer, ("tokenizers",), "tokenizers"),
    "wonderwords": (lambda _: niah._words.__wrapped__(), ("wonderwords",), "wonderwords"),
    "lm_eval": (_harness, ("lm_eval", "lm_eval.tasks"), "lm-eval"),
}


@pytest.mark.filterwarnings("ignore")  # lm_eval and what it imports warn
@pytest.mark.parametrize("name", PACKAGES)
def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    attempt, modules, distribution = PACKAGES[name]
    if name != "safetensors":
        extras.need(name)
    if name == "huggingface_hub":
        hub = importlib.import_module(name)
        monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))
    if name == "wonderwords":  # its whole list takes seconds
        words = types.SimpleNamespace(_categories={"adjectives": ["calm"], "nouns": ["sea"]})
        monkeypatch.setattr(importlib.import_module(name), "RandomWord", lambda: words)
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setitem(sys.modules, module, None)
        if name == "lm_eval":  # the command imports it by this module
            patch.delitem(sys.modules, "seqjax.evals.lm_eval.tasks", raising=False)
            patch.delattr(importlib.import_module("seqjax.evals.lm_eval"), "tasks", raising=False)
        with pytest.raises(UserError) as error:
            attempt(tmp_path)
    match = re.search(r"pip install '?seqjax\[(?P<extra>[\w-]+)\]", str(error.value))
    assert match, error.value
    _has(match["extra"], distribution)
    attempt(tmp_path)
