"""The remedies of tokenizers: their files, special tokens and settings."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqjax.config import DataConfig
from seqjax.convert import tokenizer_files
from seqjax.data import stored_tokenizer, tokenizer
from seqjax.data.prepare import Layout, prepare
from seqjax.data.prepare.__main__ import tokenizer_file
from tests import extras
from tests.remedies.follow import Remedy, follow, write


def _load(root: Path, tokenizer_path: str = "", name: str = "huggingface") -> None:
    loaded = tokenizer.load_tokenizer.__wrapped__(name, str(root / tokenizer_path) if tokenizer_path else "")
    loaded.decode(loaded.encode("a").tolist())


def _public(root: Path, to: str = "public") -> None:
    """Write the byte tokenizer as files of a public model."""
    (root / to).mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files.files_of(DataConfig(tokenizer="byte"), max_length=None).items():
        (root / to / name).write_bytes(content)


def _changed(name: str, change: Callable[[dict[str, Any]], Any], *removed: str) -> Callable[..., None]:
    """Return a `start` that changes a JSON file and removes others; the directory "copy" keeps the files."""

    def start(root: Path, patch: pytest.MonkeyPatch) -> None:
        del patch
        _public(root)
        _public(root, "copy")
        path = root / "public" / name
        change(content := json.loads(path.read_text()))
        path.write_text(json.dumps(content))
        for other in removed:
            (root / "public" / other).unlink()

    return start


def _fetch(root: Path, match: re.Match[str]) -> None:
    shutil.copy(root / "copy" / Path(match["path"]).name, match["path"])


def _set(root: Path, match: re.Match[str]) -> None:
    path = root / "public" / match["file"]
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | {match["key"]: {"eos_token": "<|eos|>", "eos_token_id": 257}[match["key"]]}))


LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 5000}
SAVED = "generation_config.json"
FETCH = r"(?P<path>\S+\.json)\b.* [Ff]etch (it|the file) again"
PUBLIC: dict[str, Remedy] = {
    "a normalizer that explodes": Remedy(
        _load,
        {"tokenizer_path": "public"},
        FETCH,
        _fetch,
        _changed("tokenizer.json", lambda c: c.update(normalizer=LONGER)),
    ),
    "ids beyond all vocabularies": Remedy(
        _load,
        {"tokenizer_path": "public"},
        FETCH,
        _fetch,
        _changed("tokenizer.json", lambda c: c["model"].update(vocab={"a": 1 << 40})),
    ),
    "a model that the package cannot read": Remedy(
        _load,
        {"tokenizer_path": "public"},
        FETCH,
        _fetch,
        _changed("tokenizer.json", lambda c: c["model"].update(type="None", vocab=c["model"]["vocab"])),
    ),
    "an id that is a text": Remedy(
        _load,
        {"tokenizer_path": "public"},
        FETCH,
        _fetch,
        _changed(SAVED, lambda c: c.update(eos_token_id="x"), "tokenizer_config.json"),
    ),
    "an end token that is not in the vocabulary": Remedy(
        _load,
        {"tokenizer_path": "public"},
        r"(?P<path>\S+): eos_token is 'none'.* fetch both files again",
        _fetch,
        _changed("tokenizer_config.json", lambda c: c.update(eos_token="none")),
    ),
    "no end token": Remedy(
        _load,
        {"tokenizer_path": "public"},
        r"set (?P<key>eos_token) in its (?P<file>[\w.]+), or",
        _set,
        _changed("tokenizer_config.json", lambda c: c.pop("eos_token"), SAVED),
    ),
    "no end id": Remedy(
        _load,
        {"tokenizer_path": "public"},
        r"or (?P<key>eos_token_id) in its (?P<file>[\w.]+)\.",
        _set,
        _changed("tokenizer_config.json", lambda c: c.pop("eos_token"), SAVED),
    ),
    "no tokenizer.json": Remedy(
        _load,
        {"tokenizer_path": "none"},
        r"config\.data\.(?P<key>tokenizer_path)=.*Give the directory of a public model",
        lambda _, match: {match["key"]: "public"},
        lambda root, _: _public(root),
    ),
    "no tokenizer.json, another tokenizer": Remedy(
        _load, {}, r"or another config\.data\.(?P<key>tokenizer)\.", lambda _, match: {"name": "byte"}
    ),
    "a file for the byte tokenizer": Remedy(
        _load,
        {"name": "byte", "tokenizer_path": "public"},
        r"set config\.data\.(?P<key>tokenizer)='mixtral' or '(?P<to>\w+)'",
        lambda _, match: {"name": match["to"]},
        lambda root, _: _public(root),
    ),
    "a file for the byte tokenizer, without it": Remedy(
        _load,
        {"name": "byte", "tokenizer_path": "public"},
        r"config\.data\.(?P<key>tokenizer_path) .* or leave the path empty",
        lambda _, match: {match["key"]: ""},
    ),
    "a misspelt tokenizer": Remedy(
        _load,
        {"name": "bytes"},
        r"config\.data\.tokenizer='bytes'.*Did you mean '(?P<to>\w+)'",
        lambda _, match: {"name": match["to"]},
    ),
    "two files in the options": Remedy(
        lambda _, name, path: tokenizer_file(name, path),
        {"name": "a/tokenizer.json", "path": "b"},
        r"leave out --tokenizer_(?P<key>path)\.",
        lambda _, match: {match["key"]: ""},
    ),
    "a file instead of a name": Remedy(
        lambda root, name: _load(root, *reversed(tokenizer_file(name, ""))),
        {"name": "public"},
        r"--tokenizer=(?P<path>\S+) is not known.*Or give its file",
        lambda root, match: {"name": str(root / match["path"] / "tokenizer.json")},
        lambda root, _: _public(root),
    ),
}


@extras.mark("tokenizers")
@pytest.mark.parametrize("name", PUBLIC)
def test_public_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    follow(PUBLIC[name], tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------------------- sentencepiece
def _train(root: Path, name: str, **ids: int) -> None:
    import sentencepiece

    write(root / "text", "the cat sat on the mat and the cat ate the rat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(root / "text"), model_prefix=str(root / name), vocab_size=30, model_type="bpe", **ids
    )


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentencepiece models: `good`, and `none` without a start token."""
    root = tmp_path_factory.mktemp("pieces")
    _train(root, "good")
    _train(root, "none", bos_id=-1)
    write(root / "text.model", "no model")
    return root


PATH = r"config\.data\.(?P<key>tokenizer_path)"


def _give_path(_: Path, match: re.Match[str]) -> dict[str, str]:
    return {match["key"]: "good.model"}


PIECES: dict[str, Remedy] = {
    "no such model": Remedy(
        _load,
        {"name": "mixtral", "tokenizer_path": "x.model"},
        f"{PATH}: no file .*; give a sentencepiece model",
        _give_path,
    ),
    "not a model": Remedy(
        _load, {"name": "mixtral", "tokenizer_path": "text.model"}, f"give another {PATH}", _give_path
    ),
    "no start token": Remedy(
        _load, {"name": "mixtral", "tokenizer_path": "none.model"}, f"give another {PATH}", _give_path
    ),
    "another vocabulary in mistral-common": Remedy(
        _load,
        {"name": "mixtral"},
        f"give the right file as {PATH}",
        _give_path,
        lambda root, patch: patch.setattr(tokenizer, "_shipped_model", lambda: root / "none.model"),
    ),
    "no vocabulary in mistral-common": Remedy(
        _load,
        {"name": "mixtral"},
        f"install mistral-common 1.13, or give the file as {PATH}",
        _give_path,
        lambda root, patch: patch.setattr(
            tokenizer.importlib.util, "find_spec", lambda name: type("Spec", (), {"origin": str(root / "none")})
        ),
    ),
}


@extras.mark("sentencepiece")
@pytest.mark.parametrize("name", PIECES)
def test_sentencepiece_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: Path, name: str):
    shutil.copytree(pieces, tmp_path, dirs_exist_ok=True)
    follow(PIECES[name], tmp_path, monkeypatch)


@extras.mark("sentencepiece", "mistral_common")
def test_the_path_of_a_missing_model_may_be_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    remedy = Remedy(
        _load,
        {"name": "mixtral", "tokenizer_path": "x.model"},
        f"{PATH}: no file .* or leave it empty",
        lambda _, match: {match["key"]: ""},
    )
    follow(remedy, tmp_path, monkeypatch)


# ----------------------------------------------------------------------------------------------- stored with the blocks
def test_a_damaged_stored_tokenizer_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its file is read where the package of the tokenizer is missing."""
    write(tmp_path / "source" / "a.jsonl", '{"text": "hello world, hello world"}\n' * 9)

    def prepared(*_: Any) -> None:
        layout = Layout(domain="a")
        prepare(str(tmp_path / "source"), tmp_path / "out", tokenizer="byte", seq_len=8, workers=1, layout=layout)

    def spoil(root: Path, patch: pytest.MonkeyPatch) -> None:
        del patch
        prepared()
        (root / "out" / stored_tokenizer.FILE).write_bytes(b"x")

    remedy = Remedy(
        lambda root: stored_tokenizer.read(root / "out" / stored_tokenizer.FILE, why="").n_bytes,
        {},
        r"(?P<path>\S+) is damaged.*delete it and run the same `seqjax prepare` command again",
        lambda _, match: [Path(match["path"]).unlink(), prepared()],
        spoil,
    )
    follow(remedy, tmp_path, monkeypatch)
