"""The remedies of models and decoding: lengths, sampling, entropy, and weights to start from."""

import dataclasses
import functools
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from seqjax import pretrained
from seqjax.config import Config
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.decoding import Sampling, StopStrings, encode, stream, tokens
from seqjax.models import Model
from seqjax.models.entropy import queries_and_keys, require_entropy
from seqjax.pretrained import Pretrained
from seqjax.sharding import make_mesh
from seqjax.training import mirrors, workdir
from tests import support
from tests.remedies.follow import Remedy, follow, last

GOLDEN = Path(__file__).parent.parent / "golden"
BYTES = {"model__vocab_size": 258}
GREEDY = Sampling(temperature=0.0)


@functools.cache  # most cases use the same models
def _model(mixer: str, **settings: Any) -> Model:
    return support.tiny_model(mixer, model__n_layers=1, **settings)


def _params(value: float = 1.0) -> Any:
    return jax.tree.map(lambda x: np.full(x.shape, value, np.float32), _model("transformer_pp", **BYTES).shapes)


def _generate(_: Path, *, value: float = 1.0, n_new: int = 1, **arguments: Any) -> None:
    """Generate text with parameters that are all `value`."""
    model, key = _model("transformer_pp", **BYTES), jax.random.key(0)
    "".join(stream(model, _params(value), ByteTokenizer(), "", key, n_new=n_new, sampling=GREEDY, **arguments))


def _tokens(_: Path, prompt: list[int], prefill_chunk: int = 0) -> None:
    model, prompt_BT = _model("transformer_pp", **BYTES), np.array([prompt], np.int32)
    options = {"n_new": 1, "sampling": GREEDY, "prefill_chunk": prefill_chunk}
    next(tokens(_params(), prompt_BT, jax.random.key(0), model=model, **options))


def _lengths(_: Path, n_tokens: int, seq_len: int = 23) -> None:
    _model("transformer", train__seq_len=seq_len).check_length(n_tokens)


def _entropy(_: Path, mixer: str = "transformer_pp", measure: bool = True, **settings: Any) -> None:
    """Check a config with attention entropy, as a run and `seqjax evaluate --entropy` do."""
    config = support.tiny(mixer, **settings)
    if measure or config.eval.entropy_tokens:
        require_entropy(_model(mixer, **settings))


def _queries(_: Path, config: str) -> None:
    model = _model(config)
    tokens_BT = jax.ShapeDtypeStruct((1, 8), np.int32)
    jax.eval_shape(lambda params, tokens: queries_and_keys(model, params, tokens)[0], model.shapes, tokens_BT)


def _loss(_: Path, text: str) -> None:
    config, model = support.tiny("transformer_pp", **BYTES), _model("transformer_pp", **BYTES)
    Pretrained(model=model, params=_params(), config=config, step=1, mesh=make_mesh()).loss(text)


def _number(key: str = "key", to: str = "to") -> Callable[[Path, re.Match[str]], dict[str, Any]]:
    return lambda _, match: {match[key]: float(match[to]) if "." in match[to] else int(match[to])}


def _sampling(_: Path, **arguments: Any) -> None:
    Sampling(**arguments).check(vocab_size=48)


MODELS: dict[str, Remedy] = {
    "parameters that overflow": Remedy(
        _generate, {"value": np.inf}, "Use an earlier checkpoint", lambda *_: {"value": 1.0}
    ),
    "an empty prompt": Remedy(
        _tokens,
        {"prompt": []},
        "start it with the tokenizer's `(?P<token>bos)`",
        lambda _, match: {"prompt": [getattr(ByteTokenizer(), match["token"])]},
    ),
    "pieces of negative length": Remedy(
        _tokens,
        {"prompt": [1], "prefill_chunk": -1},
        r"(?P<key>prefill_chunk)=-1 must be at least (?P<to>\d)",
        _number(),
    ),
    "pieces of negative length, text": Remedy(
        _generate, {"prefill_chunk": -1}, r"(?P<key>prefill_chunk) must be at least (?P<to>\d)", _number()
    ),
    "no new tokens": Remedy(
        _generate,
        {"n_new": 0},
        r"(?P<key>max_new_tokens) must be at least (?P<to>\d)",
        lambda _, match: {"n_new": int(match["to"])},
    ),
    "a temperature below 0": Remedy(
        _sampling, {"temperature": -1.0}, r"(?P<key>temperature) must be at least (?P<to>\d)", _number()
    ),
    "more tokens than the vocabulary": Remedy(
        _sampling, {"top_k": 49}, r"(?P<key>top_k)=49 must be 0 \(all\) to (?P<to>\d+)", _number()
    ),
    "no probability": Remedy(_sampling, {"top_p": 0.0}, r"(?P<key>top_p)=.* at most (?P<to>\d) \(all\)", _number()),
    "an empty stop string": Remedy(
        lambda _, stop: StopStrings(stop),
        {"stop": ""},
        r"(?P<key>stop): .*give at least one character",
        lambda _, match: {match["key"]: "x"},
    ),
    "ids beyond the vocabulary": Remedy(
        lambda _, tokenizer: encode(tokenizer, "a", vocab_size=258),
        {"tokenizer": type("Large", (ByteTokenizer,), {"encode": lambda self, text: np.array([999])})()},
        r"use the model's tokenizer \(config\.data\.(?P<key>tokenizer)\)",
        lambda _, match: {match["key"]: ByteTokenizer()},
    ),
    "more tokens than positions": Remedy(
        _lengths,
        {"n_tokens": 24},
        r"a table of (?P<to>\d+) positions, .* Use fewer tokens",
        lambda _, match: {"n_tokens": int(match["to"])},
    ),
    "more tokens than positions, longer training": Remedy(
        _lengths,
        {"n_tokens": 24},
        r"\(config\.train\.(?P<key>seq_len)\).* or train with longer sequences",
        lambda _, match: {match["key"]: 24},
    ),
    "entropy without attention": Remedy(
        _entropy, {"mixer": "gla"}, "Omit --(?P<key>entropy)", lambda *_: {"measure": False}
    ),
    "entropy of a run without attention": Remedy(
        _entropy,
        {"mixer": "gla", "measure": False, "eval__entropy_tokens": 100},
        r"leave config\.(?P<key>eval\.entropy_tokens) at (?P<to>\d)",
        lambda _, match: {match["key"].replace(".", "__"): int(match["to"])},
    ),
    "entropy of a single token": Remedy(
        _entropy,
        {"train__seq_len": 1},
        r"set a config\.(?P<key>train\.seq_len) of at least (?P<to>\d)",
        lambda _, match: {match["key"].replace(".", "__"): int(match["to"])},
    ),
    "queries of a model without": Remedy(
        _queries,
        {"config": "gla"},
        r"such as --(?P<key>config)=(?P<to>\w+)",
        lambda _, match: {match["key"]: match["to"]},
    ),
    "the loss of an empty text": Remedy(
        _loss,
        {"text": ""},
        "give at least one character",
        lambda *_: {"text": "x"},
        lambda _, patch: patch.setattr(pretrained, "_mean_loss", lambda params, *_, model: 1.0),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    follow(MODELS[name], tmp_path, monkeypatch)


# ----------------------------------------------------------------------------------------------------------- init_from
def _run(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Unpack a run as "run", and move its checkpoints away."""
    del patch
    with zipfile.ZipFile(GOLDEN / "workdirs" / "plain.zip") as packed:
        packed.extractall(root / "run")
    (root / "run" / "checkpoints").rename(root / "later")


def _recorded(root: Path) -> Config:
    return workdir.load_config(root / "run")


def _init_from(root: Path, run: str = "run", **model: Any) -> None:
    """Describe the weights for a run with the config of "run", and other settings of the model."""
    config = _recorded(root)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    pretrained.describe_weights(str(root / run), config)


def _of_table(root: Path, seq_len: int) -> None:
    config = support.tiny("transformer")
    pretrained.describe_weights(
        str(root / "table"), dataclasses.replace(config, train=dataclasses.replace(config.train, seq_len=seq_len))
    )


def _with_checkpoints(root: Path, patch: pytest.MonkeyPatch) -> None:
    _run(root, patch)
    shutil.copytree(root / "later", root / "run" / "checkpoints")


INIT_FROM: dict[str, Remedy] = {
    "a run before its first save": Remedy(
        _init_from,
        {},
        "--init_from=(?P<path>\\S+) has no checkpoint yet; let that run reach its first save",
        lambda root, match: (root / "later").rename(Path(match["path"]) / "checkpoints"),
        _run,
    ),
    "another model": Remedy(
        _init_from,
        {"dim": 64},
        r"another model than this run \(model\.(?P<key>dim): (?P<to>\d+) -> 64\): copy its config.model",
        _number(),
        _with_checkpoints,
    ),
    "another model, another run": Remedy(
        _init_from,
        {"n_layers": 3},
        r"or take the weights of a run with the same config\.model",
        lambda root, _: last(_save(root, "other", n_layers=3), {"run": "other"}),
        _with_checkpoints,
    ),
    "another length": Remedy(
        _of_table,
        {"seq_len": 99},
        r"set config\.train\.(?P<key>seq_len)=(?P<to>\d+)",
        _number(),
        lambda root, patch: [
            workdir.save_config(mirrors.Mirror(root / "table"), support.tiny("transformer")),
            patch.setattr(pretrained, "has_any", lambda match: True),
        ],
    ),
}


def _save(root: Path, to: str, **model: Any) -> None:
    """Write the workdir of a run with other settings of the model."""
    config = _recorded(root)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    workdir.save_config(mirrors.Mirror(root / to), config)
    shutil.copytree(root / "later", root / to / "checkpoints")


@pytest.mark.parametrize("name", INIT_FROM)
def test_init_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    follow(INIT_FROM[name], tmp_path, monkeypatch)
