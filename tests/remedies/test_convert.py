"""The remedies of `seqjax convert`: public weights, their config.json, and exports."""

import dataclasses
import functools
import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from seqjax.convert import __main__ as command
from seqjax.convert import directory, export_weights, import_weights, weights
from seqjax.models import Model
from tests import extras
from tests.convert.cases import GOLDEN, config_of
from tests.remedies.follow import Remedy, follow, write

# Most cases build the same models.
_config, _model = functools.cache(config_of), functools.cache(Model)


def _import(root: Path, path: str = "public", family: str = "llama", **settings: Any) -> None:
    """Import the weights of a family with a config of ours."""
    import_weights(root / path, _config(family, **settings))


def _described(root: Path, path: str = "public", config: str = "") -> None:
    """Import weights with their config.json, or with a config of ours."""
    directory.load(root / path, config=_config(config) if config else None)


def _fetched(root: Path, text: str) -> None:
    directory.load(directory.fetched(text.replace("ROOT", str(root))))


def _export(
    root: Path, out: str = "out", family: str = "llama", value: float = 0.0, dtype: str = "float32", **settings: Any
) -> None:
    """Export weights that are all `value`, with a tokenizer unless `weights_only` is set."""
    weights_only = settings.pop("weights_only", False)
    tokenizer, path = settings.pop("tokenizer", "byte"), settings.pop("tokenizer_path", "")
    config = _config(family, **settings)
    data = dataclasses.replace(config.data, tokenizer=tokenizer, tokenizer_path=path)
    shapes = _model(config.model, max_len=config.train.seq_len).shapes
    params = jax.tree.map(lambda x: np.full(x.shape, value, np.float32), shapes)
    config = dataclasses.replace(config, data=data)
    directory.export(params, config, root / out, dtype=dtype, with_tokenizer=not weights_only)


def _export_weights(root: Path, out: str = "out", **settings: Any) -> None:
    config = _config("llama", **settings)
    shapes = _model(config.model, max_len=config.train.seq_len).shapes
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    export_weights(params, config, root / out / directory.WEIGHTS)


def _changed(change: Callable[[dict[str, Any]], Any], family: str = "llama") -> Callable[..., None]:
    """Return a `start` that changes the config.json of a public model; the directory "copy" keeps the files."""

    def start(root: Path, patch: pytest.MonkeyPatch) -> None:
        del patch
        _copies(root, family)
        path = root / "public" / "config.json"
        change(content := json.loads(path.read_text()))
        path.write_text(json.dumps(content))

    return start


def _tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[..., None]:
    """Return a `start` that changes the tensors of a public model."""

    def start(root: Path, patch: pytest.MonkeyPatch) -> None:
        del patch
        _copies(root)
        path = root / "public" / directory.WEIGHTS
        change(tensors := safetensors.numpy.load_file(path))
        safetensors.numpy.save_file(tensors, path)

    return start


def _copies(root: Path, family: str = "llama") -> None:
    for name in ("public", "copy"):
        shutil.copytree(GOLDEN / family, root / name)


def _sharded(spoil: Callable[[Path], Any]) -> Callable[..., None]:
    """Return a `start` that divides a public model into two shards with an index, and damages it."""

    def start(root: Path, patch: pytest.MonkeyPatch) -> None:
        del patch
        shutil.copytree(GOLDEN / "llama", root / "public")
        tensors = safetensors.numpy.load_file(root / "public" / directory.WEIGHTS)
        (root / "public" / directory.WEIGHTS).unlink()
        halves = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
        for file, names in halves.items():
            safetensors.numpy.save_file({name: tensors[name] for name in names}, root / "public" / file)
        where = {name: file for file, names in halves.items() for name in names}
        write(root / "public" / directory.INDEX, json.dumps({"weight_map": where}))
        shutil.copytree(root / "public", root / "copy")
        spoil(root / "public")

    return start


def _fetch(root: Path, _: re.Match[str]) -> None:
    shutil.copytree(root / "copy", root / "public", dirs_exist_ok=True)


def _index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def spoil(public: Path) -> None:
        change(where := json.loads((public / directory.INDEX).read_text())["weight_map"])
        write(public / directory.INDEX, json.dumps({"weight_map": where}))

    return spoil


def _set(_: Path, match: re.Match[str]) -> dict[str, Any]:
    """Give a setting its value in the message."""
    value = {"True": True, "False": False, "None": None}.get(match["to"], match["to"])
    if isinstance(value, str) and re.fullmatch(r"[\d.e-]+", value):
        value = float(value)
    return {f"{match['key']}".replace(".", "__"): value}


def _hub(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the hub have the model OWNER/NAME, which is also in the directory "public"."""
    shutil.copytree(GOLDEN / "llama", root / "public")

    def snapshot_download(name: str, **_: Any) -> str:
        if name != "OWNER/NAME":
            raise FileNotFoundError(f"404: {name}")
        return str(root / "public")

    patch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))


def _as_safetensors(root: Path, _: re.Match[str]) -> None:
    """Save pickled weights as safetensors, as if they had been opened where they are trusted."""
    for path in (root / "public").glob("*.bin"):
        path.unlink()
    shutil.copy(GOLDEN / "llama" / directory.WEIGHTS, root / "public")


def _used(root: Path, workdir: str = "used") -> None:
    command.to_workdir(root / "public", None, root / workdir)


def _no_checkpoints(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Write the workdir "used" without its checkpoint, which would take a second."""
    shutil.copytree(GOLDEN / "llama", root / "public")
    nothing = types.SimpleNamespace(save_params=lambda *_: None, wait=lambda: None, close=lambda: None)
    patch.setattr(command, "Checkpoints", lambda path: nothing)
    write(root / "used" / "config.json", "{}")


FETCH = "(?i:download (it|them))"
FIX = r"(?P<path>\S+config\.json)\b.*; fix it, or (?P<how>remove it) to skip the check"


def _mend_config(root: Path, match: re.Match[str]) -> None:
    shutil.copy(root / "copy" / "config.json", match["path"])


def _remove_config(_: Path, match: re.Match[str]) -> None:
    Path(match["path"]).unlink()


ROPE = {"rope_type": "llama3", "rope_theta": 5e4}
IMPORTS: dict[str, Remedy] = {
    "a workdir in use": Remedy(
        _used,
        {},
        "used holds a run.* new --(?P<key>workdir)",
        lambda _, match: {match["key"]: "new"},
        _no_checkpoints,
    ),
    "a file that was cut": Remedy(
        _import,
        {},
        FETCH,
        _fetch,
        lambda root, _: [_copies(root), (root / "public" / directory.WEIGHTS).write_bytes(b"\x40" + bytes(90))],
    ),
    "a file that is longer than its header": Remedy(
        _import,
        {},
        FETCH,
        _fetch,
        lambda root, _: [_copies(root), (root / "public" / directory.WEIGHTS).write_bytes(b"\xff" * 90)],
    ),
    "an index of another shard": Remedy(
        _import, {}, FETCH, _fetch, _sharded(_index(lambda where: where.update({"lm_head.weight": "b.safetensors"})))
    ),
    "an index of a missing shard": Remedy(
        _import, {}, FETCH, _fetch, _sharded(lambda public: (public / "b.safetensors").unlink())
    ),
    "an index of a path": Remedy(
        _import, {}, FETCH, _fetch, _sharded(_index(lambda where: where.update(x="../b.safetensors")))
    ),
    "an index of another form": Remedy(
        _import, {}, FETCH, _fetch, _sharded(lambda public: write(public / directory.INDEX, "{}"))
    ),
    "several files": Remedy(
        _described,
        {},
        r"2 \.safetensors files .*path of one",
        lambda _, match: {"path": "public/a.safetensors"},
        lambda root, _: [
            _copies(root),
            (root / "public" / directory.WEIGHTS).rename(root / "public" / "a.safetensors"),
            shutil.copy(root / "public" / "a.safetensors", root / "public" / "b.safetensors"),
        ],
    ),
    "pickled weights": Remedy(
        _import,
        {},
        "--weights=(?P<path>\\S+): .*save it once as safetensors",
        _as_safetensors,
        lambda root, _: write(root / "public" / "model.bin", "x"),
    ),
    "values that are not finite": Remedy(
        _import,
        {},
        "Use other weights",
        lambda *_: {"path": "copy"},
        _tensors(lambda tensors: tensors["model.norm.weight"].fill(np.nan)),
    ),
    "too many layers": Remedy(
        _import,
        {"model__n_layers": 1000},
        r"config\.(?P<key>model\.n_layers)=.* the number of layers in the file",
        lambda root, match: {
            match["key"].replace(".", "__"): json.loads((root / "copy/config.json").read_text())["num_hidden_layers"]
        },
        lambda root, _: [_copies(root), (root / "public" / "config.json").unlink()],
    ),
    "a head that is not tied": Remedy(
        _import,
        {"model__tie_embeddings": True},
        r"Set config\.(?P<key>model\.tie_embeddings)=(?P<to>\w+)",
        _set,
        lambda root, _: [_copies(root), (root / "public" / "config.json").unlink()],
    ),
    "a head that is tied": Remedy(
        _import,
        {},
        r"config\.(?P<key>model\.tie_embeddings)=(?P<to>\w+)",
        _set,
        lambda root, patch: [
            _tensors(lambda tensors: tensors.pop("lm_head.weight"))(root, patch),
            (root / "public" / "config.json").unlink(),
        ],
    ),
    "another architecture": Remedy(
        _import,
        {"model__mixer__conv": True},
        r"config\.(?P<key>[\w.]+) must be (?P<to>\w+),",
        _set,
        lambda root, _: [_copies(root), (root / "public" / "config.json").unlink()],
    ),
    "the config of another mixer": Remedy(
        _import,
        {"family": "mamba"},
        r"model_type '(?P<to>\w+)', .*Give the --config",
        lambda _, match: {"family": match["to"]},
        lambda root, _: _copies(root),
    ),
    "a public config without a size": Remedy(
        _described,
        {},
        "hidden_size.*Give --(?P<key>config)",
        lambda _, match: {match["key"]: "llama"},
        _changed(lambda content: content.pop("hidden_size")),
    ),
    "a public config with a size beyond all devices": Remedy(
        _described,
        {},
        FETCH,
        _fetch,
        _changed(lambda content: content.update(intermediate_size=None, hidden_ratio=1 << 30), "deltanet"),
    ),
    **{
        f"a public config {what}, {how}": Remedy(_import, {}, FIX, mend, _changed(change))
        for what, change in {
            "of another form": lambda content: content.update(hidden_size="x"),
            "with text that is not JSON": lambda content: content.update(model_type=3),
            "without a number": lambda content: content.update(rope_parameters=ROPE),
        }.items()
        for how, mend in {"mended": _mend_config, "removed": _remove_config}.items()
    },
    **{
        f"a public config with an infinite size, {how}": Remedy(
            _import,
            {"family": "deltanet"},
            FIX,
            mend,
            _changed(lambda content: content.update(intermediate_size=None, hidden_ratio=1e308), "deltanet"),
        )
        for how, mend in {"mended": _mend_config, "removed": _remove_config}.items()
    },
    "added tokens": Remedy(
        _described,
        {},
        r"tokenizer\.model.*Save .* as (?P<file>tokenizer\.json)",
        lambda root, match: write(root / "public" / match["file"], "{}"),
        lambda root, _: [
            _copies(root),
            write(root / "public" / "tokenizer.model", "x"),
            write(root / "public" / "added_tokens.json", "{}"),
        ],
    ),
    "a name instead of a directory": Remedy(
        _fetched,
        {"text": "OWNER/NAME"},
        r"is (?P<scheme>hf://)OWNER/NAME",
        lambda _, match: {"text": f"{match['scheme']}OWNER/NAME"},
        _hub,
    ),
    "a name of another form": Remedy(
        _fetched,
        {"text": "hf://a/OWNER/NAME"},
        r"write (?P<to>hf://OWNER/NAME) or",
        lambda _, match: {"text": match["to"]},
        _hub,
    ),
    "a name with a revision": Remedy(
        _fetched,
        {"text": "hf://a/OWNER/NAME"},
        r"or (?P<to>hf://OWNER/NAME@REVISION)",
        lambda _, match: {"text": match["to"]},
        _hub,
    ),
    "a model that the hub does not have": Remedy(
        _fetched,
        {"text": "hf://OWNER/NAM"},
        r"404: OWNER/NAM.* Check the name",
        lambda _, match: {"text": "hf://OWNER/NAME"},
        _hub,
    ),
    "a model that the hub does not have, downloaded": Remedy(
        _fetched,
        {"text": "hf://OWNER/NAM"},
        "or give the path of a downloaded directory",
        lambda root, _: {"text": "ROOT/public"},
        _hub,
    ),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(weights, "Model", _model)
    follow(IMPORTS[name], tmp_path, monkeypatch)


ONLY = r"[Ee]xport with --(?P<key>weights_only)"


def _weights_only(_: Path, match: re.Match[str]) -> dict[str, bool]:
    return {match["key"]: True}


def _other_out(_: Path, match: re.Match[str]) -> dict[str, str]:
    del match
    return {"out": "new"}


EXPORTS: dict[str, Remedy] = {
    "biases of a window": Remedy(
        _export_weights,
        {"model__mixer__window": 8, "model__mixer__bias": True},
        r"set config\.(?P<a>model\.mixer\.bias) and config\.(?P<b>model\.mlp\.bias) to (?P<to>False)",
        lambda _, match: {match[key].replace(".", "__"): False for key in "ab"},
    ),
    "a window with biases": Remedy(
        _export_weights,
        {"model__mixer__window": 8, "model__mixer__bias": True, "model__mlp__bias": True},
        r"or config\.(?P<key>model\.mixer\.window) to (?P<to>None)",
        _set,
    ),
    "norms of another eps": Remedy(
        _export,
        {"family": "rwkv7", "model__norm_eps": 1e-5, "weights_only": True},
        r"--config\.(?P<key>model\.norm_eps)=(?P<to>[\de.-]+) to export",
        _set,
    ),
    "norms of two eps": Remedy(
        _export,
        {"family": "deltanet", "model__mixer__norm_eps": 1e-5, "weights_only": True},
        r"has one norm_eps, and this config has (?P<to>[\de.-]+) .*Train with one value",
        lambda _, match: {"model__mixer__norm_eps": float(match["to"])},
    ),
    "a tokenizer that is not there": Remedy(_export, {"tokenizer": "huggingface"}, ONLY, _weights_only),
    "a tokenizer with more ids": Remedy(_export, {"model__vocab_size": 100}, ONLY, _weights_only),
    "a family with its own tokenizer": Remedy(
        _export, {"family": "qwen2", "model__vocab_size": 264}, ONLY, _weights_only
    ),
    "a directory of another tokenizer": Remedy(
        _export,
        {},
        "export into an empty directory",
        _other_out,
        lambda root, _: write(root / "out" / "tokenizer.json", "{}"),
    ),
    "a directory of another model": Remedy(
        _export,
        {},
        "export into an empty directory",
        _other_out,
        lambda root, _: shutil.copytree(GOLDEN / "qwen2", root / "out"),
    ),
    "numbers that are too large": Remedy(
        _export,
        {"value": 1e6, "dtype": "float16"},
        "use another --(?P<key>dtype)",
        lambda _, match: {match["key"]: "bfloat16"},
    ),
    "a checkpoint that diverged": Remedy(
        _export, {"value": np.nan}, "a checkpoint from before training diverged", lambda *_: {"value": 1.0}
    ),
    "a directory that cannot be written": Remedy(
        _export,
        {"out": "file/out", "weights_only": True},
        "give another --(?P<key>out)",
        _other_out,
        lambda root, _: write(root / "file", ""),
    ),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(weights, "Model", _model)
    follow(EXPORTS[name], tmp_path, monkeypatch)


@extras.mark("sentencepiece")
def test_a_sentencepiece_model_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sentencepiece

    write(tmp_path / "text", "the cat sat on the mat and the cat ate the rat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=30, model_type="bpe"
    )
    remedy = Remedy(_export, {"tokenizer": "mixtral", "tokenizer_path": str(tmp_path / "m.model")}, ONLY, _weights_only)
    follow(remedy, tmp_path, monkeypatch)
