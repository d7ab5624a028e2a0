"""The remedies of `seqjax harness`, `niah`, `repeats` and `recall`."""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqjax.data.corpus import Corpus, EvalBlocks
from seqjax.evals import niah, repeats, scoring
from seqjax.evals.recall import __main__ as recall
from seqjax.evals.recall import report
from seqjax.models import Model
from seqjax.pretrained import Pretrained
from seqjax.sharding import make_mesh
from tests import extras, support
from tests.remedies.follow import Remedy, follow, write

GOLDEN = Path(__file__).parent.parent / "golden"


@functools.cache
def _pretrained(mixer: str = "transformer_pp", seq_len: int = 20) -> Pretrained:
    """A model whose parameters are never used."""
    config = support.tiny(mixer, model__vocab_size=258, model__n_layers=1, train__seq_len=seq_len)
    model = Model(config.model, max_len=seq_len)
    return Pretrained(model=model, params={}, config=config, step=1, mesh=make_mesh())


def _number(_: Path, match: re.Match[str]) -> dict[str, int]:
    return {match["key"]: int(match["to"])}


# ------------------------------------------------------------------------------------------------------------- harness
def _harness(root: Path, **options: Any) -> None:
    """Read the options of the command."""
    from seqjax.evals.lm_eval import __main__ as harness

    arguments = {"workdir": f"{root}/run", "tasks": "local"} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "_run", lambda args, out: None)
        harness.main([f"--{name}={str(value).replace('ROOT', str(root))}" for name, value in arguments.items()])


def _evaluated(root: Path) -> None:
    """Evaluate a task; lm_eval returns results only to the first of several processes."""
    import lm_eval

    from seqjax.evals.lm_eval import __main__ as harness

    del root
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval, "simple_evaluate", lambda **_: None if os.environ.get("LOCAL_RANK") else {"results": {}})
        harness._measured(None, None, "copa", {"num_fewshot": 0, "limit": 0})


def _lm(_: Path, mixer: str = "transformer_pp", seq_len: int = 20, **arguments: Any) -> Any:
    from seqjax.evals.lm_eval.lm import SeqjaxLM

    return SeqjaxLM(_pretrained(mixer, seq_len), **arguments)


def _prompt(root: Path, n_new: int, **arguments: Any) -> None:
    _lm(root, **arguments)._prompt("context", {"max_gen_toks": n_new})


def _scored(root: Path, max_length: int = 0) -> None:
    """Score a continuation of nine tokens without a model."""
    from seqjax.evals.lm_eval import lm

    def score(model: Any, params: Any, requests: Sequence[Any], *, max_length: int, **_: Any) -> list[scoring.Score]:
        scoring._rows(requests, max_length)
        return [scoring.Score(0.0, True) for _ in requests]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "score", score)
        _lm(root, max_length=max_length)._loglikelihood_tokens([(None, [1], list(range(9)))])


def _settings(_: Path, **settings: Any) -> None:
    from seqjax.evals.lm_eval.lm import generation_settings

    generation_settings(settings)


def _manager(root: Path, tasks: str = "local_copy", include: str = "") -> None:
    """Find tasks; the tasks of lm_eval itself are not read."""
    from seqjax.evals.lm_eval import tasks as harness_tasks

    manager = harness_tasks.Manager
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness_tasks, "Manager", lambda **options: manager(**options | {"include_defaults": False}))
        harness_tasks.manager([tasks], [root / include] if include else [])


def _loaded(root: Path) -> None:
    """Load a task with its data, which needs a network."""
    from lm_eval.tasks import TaskManager

    from seqjax.evals.lm_eval import tasks as harness_tasks

    def load(self: Any, names: Any) -> Any:
        if not (root / "network").exists():
            raise ConnectionError("no network")
        return names

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskManager, "load", load)
        harness_tasks.Manager(include_defaults=False, include_path=[]).load(["copa"])


def _results(root: Path) -> None:
    from seqjax.evals.lm_eval import results

    results.read(root / "out")


HARNESS: dict[str, Remedy] = {
    "fewer than no documents": Remedy(
        _harness, {"limit": -1}, r"--(?P<key>limit) must be at least (?P<to>\d)", _number
    ),
    "results in a store": Remedy(
        _harness,
        {"workdir": "gs://b/c"},
        "local directory .* --(?P<key>out)",
        lambda _, match: {match["key"]: "ROOT/out"},
    ),
    "results behind a link": Remedy(
        _harness,
        {},
        r"is a link to (?P<to>\S+): .* --(?P<key>out)",
        lambda _, match: {match["key"]: match["to"]},
        lambda root, _: [(root / "run").mkdir(), (root / "run" / "harness").symlink_to(root / "elsewhere")],
    ),
    "a batch of so many texts": Remedy(
        _lm,
        {"batch_size": 4},
        r"(?P<drop>batch_size)=4: .* (?P<key>batch_tokens)=(?P<to>\d+)",
        lambda _, match: {match["drop"]: None, match["key"]: int(match["to"])},
    ),
    "another device": Remedy(
        _lm,
        {"device": "tpu"},
        r"(?P<drop>device)=tpu: .* set JAX_PLATFORMS=(?P<to>cpu)",
        lambda _, match: {match["drop"]: None},
    ),
    "a negative length": Remedy(_lm, {"max_length": -1}, r"(?P<key>max_length)=-1: give at least (?P<to>\d)", _number),
    "a length beyond the table": Remedy(
        _lm,
        {"mixer": "transformer", "max_length": 30},
        r"(?P<key>max_length)=30: .*; give (?P<to>\d+) or fewer",
        _number,
    ),
    "more new tokens than fit": Remedy(
        _prompt,
        {"n_new": 30},
        r"requests (?P<to>\d+) new tokens.* Give a larger --(?P<key>max_length)",
        lambda _, match: {match["key"]: int(match["to"]) + 1},
    ),
    "more new tokens than fit, longer training": Remedy(
        _prompt,
        {"n_new": 30},
        r"requests (?P<to>\d+) new tokens.*\(config\.train\.(?P<key>seq_len)\)",
        lambda _, match: {match["key"]: int(match["to"]) + 1},
    ),
    "a continuation that does not fit": Remedy(
        _scored,
        {"max_length": 5},
        r"(?P<to>\d+) continuation tokens; .* A larger (?P<key>max_length)",
        _number,
    ),
    "unknown settings": Remedy(
        _settings,
        {"max_token": 9},
        r"max_token is .*Supported: .*\b(?P<to>max_tokens)\b",
        lambda _, match: {"max_token": None, match["to"]: 9},
    ),
    "no new tokens": Remedy(
        _settings, {"max_gen_toks": 0}, r"(?P<key>max_gen_toks)=0; give at least (?P<to>\d)", _number
    ),
    "a misspelt task": Remedy(
        _manager,
        {"tasks": "local_cpy"},
        r"--(?P<key>tasks): .*Did you mean '(?P<to>\w+)'",
        lambda _, match: {match["key"]: match["to"]},
    ),
    "no directory of tasks": Remedy(
        _manager,
        {"include": "none"},
        "--(?P<key>include)=.*; give a directory with YAML tasks",
        lambda root, match: [(root / "yaml").mkdir(), {match["key"]: "yaml"}][-1],
    ),
    "no network": Remedy(
        _loaded,
        {},
        "repeat the command with a (?P<file>network)",
        lambda root, match: write(root / match["file"], ""),
    ),
    "one of several processes": Remedy(
        _evaluated,
        {},
        "run one process, without (?P<variable>LOCAL_RANK)",
        lambda _, match: os.environ.pop(match["variable"]),
        lambda _, patch: patch.setenv("LOCAL_RANK", "1"),
    ),
    "a damaged result": Remedy(
        _results,
        {},
        r"(?P<path>\S+) is not JSON .*; delete it",
        lambda _, match: Path(match["path"]).unlink(),
        lambda root, _: write(root / "out" / "copa.json", "{"),
    ),
}


@extras.mark("lm_eval")
@pytest.mark.filterwarnings("ignore")  # lm_eval and what it imports warn
@pytest.mark.parametrize("name", HARNESS)
def test_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    remedy = HARNESS[name]
    attempt = remedy.attempt if remedy.attempt is _harness else _without_none(remedy.attempt)
    follow(dataclasses.replace(remedy, attempt=attempt), tmp_path, monkeypatch)


def _without_none(attempt: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attempt without the arguments that are None."""
    return lambda root, **arguments: attempt(root, **{key: x for key, x in arguments.items() if x is not None})


# -------------------------------------------------------------------------------------------------- niah and repeats
class _Corpus(Corpus):
    """Nine held-out blocks of 80 tokens in the domain `long`, three in `short`."""

    seq_len, eval_domains, manifest_hash = 79, ("short", "long"), "x"

    def __init__(self) -> None: ...

    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        del seed
        tokens = np.zeros((min(count, 9 if domain == "long" else 3), 80), np.int32)
        return EvalBlocks(tokens, *[np.arange(len(tokens))] * 3, None)

    def train_iterator(self, **_: Any) -> Any: ...

    def train_sample(self, domain: str, *, count: int) -> Any: ...


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a model without parameters, and measure nothing."""
    m = _pretrained("transformer", 1000)
    for module in (niah, repeats):
        monkeypatch.setattr(module.seqjax, "load", lambda *_, **__: m)
        monkeypatch.setattr(module, "fingerprint", lambda params: "")
    monkeypatch.setattr(niah, "accuracy", lambda *_, **__: 1.0)
    monkeypatch.setattr(niah, "_words", lambda: ["calm-sea", "old-hill"])
    monkeypatch.setattr(repeats, "open_corpus", lambda *_, **__: _Corpus())
    monkeypatch.setattr(repeats, "losses", lambda m, sequences, batch_size: np.zeros(len(sequences)))


def _command(module: Any, **defaults: Any) -> Callable[..., None]:
    def attempt(root: Path, **options: Any) -> None:
        arguments = {"workdir": root} | defaults | options
        module.main([f"--{name}={value}" for name, value in arguments.items()])

    return attempt


_niah, _repeats = _command(niah, lengths="900", samples=1), _command(repeats, lengths="160", samples=2, domain="long")
LENGTHS: dict[str, Remedy] = {
    "no samples": Remedy(_niah, {"samples": 0}, r"--(?P<key>samples)=0: give at least (?P<to>\d)", _number),
    "prompts beyond the table": Remedy(
        _niah,
        {"lengths": "2048"},
        r"--(?P<key>lengths): .* table has (?P<n>\d+) entries; give shorter",
        lambda _, match: {match["key"]: int(match["n"]) - 1},
    ),
    "no prompt of so few tokens": Remedy(
        _command(niah, samples=1),
        {"lengths": "40"},
        r"--(?P<key>lengths): 40 tokens are too few .*; give more",
        lambda _, match: {match["key"]: 900},
    ),
    "a damaged niah.json": Remedy(
        _niah,
        {},
        r"(?P<path>\S+) is not JSON .*; delete it, and its lengths are measured again",
        lambda _, match: Path(match["path"]).unlink(),
        lambda root, _: write(root / "niah.json", "{"),
    ),
    "no batch": Remedy(_repeats, {"batch_size": 0}, r"--(?P<key>batch_size)=0: give at least (?P<to>\d)", _number),
    "shorter than two passages": Remedy(
        _repeats, {"lengths": "9"}, r"--(?P<key>lengths): .*; give at least (?P<to>\d+)", _number
    ),
    "samples beyond the table": Remedy(
        _repeats,
        {"lengths": "2048"},
        r"--(?P<key>lengths): .* table has (?P<n>\d+) entries; give shorter",
        lambda _, match: {match["key"]: int(match["n"]) // 2},
    ),
    "another domain": Remedy(
        _repeats,
        {"domain": "other"},
        r"--(?P<key>domain)=other: .* short, (?P<to>\w+)\.",
        lambda _, match: {match["key"]: match["to"]},
    ),
    "too few blocks": Remedy(
        _repeats,
        {"domain": "short", "lengths": "160"},
        r"--(?P<key>lengths)=160: .*Give a shorter length",
        lambda _, match: {match["key"]: "128"},
    ),
    "too few blocks, another domain": Remedy(
        _repeats,
        {"domain": "short", "lengths": "160"},
        r"or another --(?P<key>domain)",
        lambda _, match: {match["key"]: "long"},
    ),
}


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("name", LENGTHS)
def test_niah_and_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    follow(LENGTHS[name], tmp_path, monkeypatch)


# -------------------------------------------------------------------------------------------------------------- recall
def _recall(root: Path, out: str = "recall", **options: Any) -> None:
    arguments = {"size": "demo", "out": root / out} | options
    recall.main([f"--{name}={value}" for name, value in arguments.items()])


def _golden(change: Callable[[str], str]) -> Callable[..., None]:
    """Return a `start` with changed results."""

    def start(root: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(recall, "_train", lambda *_, **__: None)
        patch.setattr(report, "write", lambda *_, **__: None)
        write(root / "recall" / report.RESULTS, change((GOLDEN / "recall" / report.RESULTS).read_text()))

    return start


def _another(_: Path, match: re.Match[str]) -> dict[str, str]:
    return {match["another"]: "new"}


OWN = """
from seqjax.config import presets
def get_config(arg=""):
    return presets.get_config("debug", name="x", mixer={"name": "gla"})
"""


def _own_model(root: Path, **options: Any) -> None:
    write(root / "own.py", OWN)
    _recall(root, models=root / "own.py", **options)


def _of_own_code(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Leave a result of a model with other code than it has now."""
    patch.chdir(root)
    line = json.loads((GOLDEN / "recall" / report.RESULTS).read_text().splitlines()[0])
    changed = json.dumps(line | {"model": str(root / "own.py"), "mixers": {"x": "0"}})
    _golden(lambda text: changed + "\n")(root, patch)


def _delete_lines(root: Path, match: re.Match[str]) -> None:
    path = Path(match["path"])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if f'"{match["name"]}"' not in line))


RECALL: dict[str, Remedy] = {
    "results of another size": Remedy(
        _recall,
        {},
        r"Give another --(?P<another>out)",
        _another,
        _golden(lambda text: text.replace('"task": "mqar", "asked": "', '"task": "mqar", "asked": "0')),
    ),
    "results of other code": Remedy(
        _own_model, {}, r"code changed.*Give another --(?P<another>out)", _another, _of_own_code
    ),
    "results of other code, deleted": Remedy(
        _own_model,
        {},
        r"(?P<path>\S+) has results for (?P<name>\S+) .*code changed.*delete these lines",
        _delete_lines,
        _of_own_code,
    ),
    "a damaged line": Remedy(
        _recall,
        {},
        r"(?P<path>\S+): line (?P<line>\d+) is not JSON .*; delete this line",
        lambda root, match: _without_line(Path(match["path"]), int(match["line"])),
        _golden(lambda text: "{\n"),
    ),
    "runs that failed": Remedy(
        _recall,
        {"jobs": 2},
        r"(?P<n>\d) runs failed.* Repeat the command",
        lambda *_: None,
        lambda root, patch: [
            _golden(lambda text: "")(root, patch),
            patch.setattr(recall, "_in_processes", _failing_once(root)),
        ],
    ),
}


def _failing_once(root: Path) -> Callable[..., int]:
    def run(*_: Any, **__: Any) -> int:
        failed = not (root / "failed").exists()
        write(root / "failed", "")
        return int(failed)

    return run


def _without_line(path: Path, line: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text for i, text in enumerate(lines, start=1) if i != line))


@pytest.mark.parametrize("name", RECALL)
def test_recall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    follow(RECALL[name], tmp_path, monkeypatch)
