"""The remedies in error messages are followed: the error is gone, or the next step is reached.

Each case is a row in a table; tests/remedies/support.py follows it.
"""

import dataclasses
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from seqjax import sharding, store
from seqjax.commands import generate
from seqjax.config import from_config_dict, presets
from seqjax.data import layout
from seqjax.data.prepare import prepare
from seqjax.errors import UserError
from seqjax.evals.lm_eval import results
from seqjax.evals.recall import __main__ as recall
from seqjax.training import lock, metrics, mirrors, step, workdir
from tests.remedies.follow import write
from tests.remedies.support import (
    FOUND,
    GOLDEN,
    MAKE,
    MEANT,
    NO_RUN,
    Case,
    Commands,
    cut,
    first_file,
    follow_case,
    make_corpus,
    move,
    open_blocks,
    prepare_again,
    prepare_blocks,
    run_command,
    unpack_run,
    write_source,
)

# A command, the advice in its error, the old word, and the error of the next step ("" if the command then works).
# The advice has a named group: `to` replaces the old word; `option` gets `value`; `another` is an option that gets
# another directory; `drop` is left out; `add` is added in place of the old word; `delete` is a path to delete.
TRAIN = "train --config=NAME:debug"


PREPARE = "prepare --tokenizer=byte --seq_len=16 --workers=1"


COMMANDS: list[tuple[str, str, str, str]] = [
    ("trian --config=top1_chunk:debug", MEANT, "trian", ""),
    ("train --config=top1_chnk:debug", MEANT, "top1_chnk", ""),
    ("train --config=NAME:debg", MEANT, "debg", ""),
    ("train NAME:debug", r"write (?P<to>\S+)\.", "NAME:debug", ""),
    (f"{TRAIN} --lr=3", r"write (?P<to>\S+)\.", "--lr=3", ""),
    (f"{TRAIN} optim.lr=3", r"write (?P<to>\S+)\.", "optim.lr=3", ""),
    (f"{TRAIN} --dim=64", r"write (?P<to>\S+) or", "--dim=64", ""),
    (f"{TRAIN} --dim=64", r" or (?P<to>\S+)\.", "--dim=64", ""),
    (f"{TRAIN} --config.optim.lrr=3", MEANT, "lrr", ""),
    (f"{TRAIN} --wordir=x", r"Did you mean (?P<to>--\w+)\?", "--wordir", ""),
    (f"{TRAIN} --config.train.steps", r"write (?P<to>\S+)=VALUE", "--config.train.steps", "VALUE"),
    (f"{TRAIN},data.train_domains=c4,arxiv", r"quotes: '(?P<to>\S+)'", f"{TRAIN[6:]},data.train_domains=c4,arxiv", ""),
    (f"{TRAIN},data.train_domains=c4,arxiv", r"or (?P<add>--config\.\S+) apart", ",data.train_domains=c4,arxiv", ""),
    (
        f"{TRAIN} --config.train.ends=0.5,1 --config.optim.cooldown=0",
        r"(?P<option>config\.optim\.cooldown).* such as (?P<value>0\.\d+)",
        "",
        "",
    ),
    (
        f"{TRAIN} --config.data.corpus=tfds",
        r"(?P<to>--config\.data\.corpus=tfds --config.data.tfds=\S+),",
        "--config.data.corpus=tfds",
        "",
    ),
    (f"{TRAIN} --config.data.corpus=tfds", r"(?P<drop>neither)", "--config.data.corpus=tfds", ""),
    (f"{TRAIN} --config.model.canon=AX", MEANT, "AX", ""),
    (
        f"{TRAIN} --config.model.mlp.kind=none --config.model.canon=AC",
        r"set (?P<option>config\.\w+\.\w+)='(?P<value>\w+)'",
        "",
        "",
    ),
    (f"{TRAIN} --config.model.mixer[0].top_k=1", r"write (?P<to>\S+)\.", "model.mixer[0].top_k", ""),
    (f"{TRAIN} --config.optim=3", r"as in (?P<to>\S+)=", "optim", "less than 1"),
    (f"{TRAIN} --config.model.mixer.name=top1_chnk", MEANT, "top1_chnk", ""),
    (f"{TRAIN} --config.model.mixer.top_k=0", r"(?P<option>config\S+)=0.*choose (?P<value>\d+)", "", ""),
    (f"{TRAIN} --config.model.mixer.top_k=9", r"(?P<option>config\S+)=9.*at most (?P<value>\d+)", "", ""),
    (f"{TRAIN} --config.model.mixer.chunk_size=999", r"(?P<option>config\S+)=9.* to (?P<value>\d+) tokens", "", ""),
    (
        f"{TRAIN} --config.model.mixer.selection=shortlist --config.model.mixer.shortlist=1 "
        "--config.model.mixer.chunk_size=8 --config.model.mixer.top_k=2",
        r"(?P<option>config\S+)=1.*shortlist to (?P<value>\d+)",
        "",
        "",
    ),
    (
        "train --config=transformer_pp:debug --config.model.mixer.window=0",
        r"(?P<option>config\S+)=.* or (?P<value>None)",
        "",
        "",
    ),
    (
        "train --config=transformer_pp:debug --config.model.mixer.rope_base=0",
        r"set (?P<add>position=none)",
        " --config.model.mixer.rope_base=0",
        "",
    ),
    (
        "train --config=transformer_pp:debug --config.model.mixer.temperature=1 --config.model.mixer.qk_norm=True",
        r"set (?P<to>qk_norm=False)",
        "qk_norm=True",
        "",
    ),
    (
        "train --config=transformer_pp:debug --config.model.mixer.rope_scaling=llama3 "
        "--config.model.mixer.position=none",
        r"set (?P<to>rope_scaling=none)",
        "rope_scaling=llama3",
        "",
    ),
    (
        "train --config=transformer_pp:debug --config.model.mixer.const=k --config.model.mixer.conv=True",
        r"[Ss]et (?P<to>conv=False)",
        "conv=True",
        "",
    ),
    (
        "train --config=transformer_pp:debug --config.model.mixer.const=k --config.model.mixer.conv=True",
        r"or (?P<to>const=none)",
        "const=k",
        "",
    ),
    (
        "train --config=kda:debug --config.model.mixer.lower_bound=1",
        r"(?P<option>config\S+)=.*; (?P<value>-\d+)",
        "",
        "",
    ),
    (
        "train --config=nsa:debug --config.model.mixer.blocks=1",
        r"(?P<option>config\S+)=.*at least (?P<value>\d+)",
        "",
        "",
    ),
    (
        "train --config=fox:debug --config.model.mixer.kv_shift=True --config.model.mixer.conv=True",
        r"set (?P<to>kv_shift=False)",
        "kv_shift=True",
        "",
    ),
    (f"{TRAIN} --workdir=", r"in (?P<option>--\w+)=,.* `(?P<value>\.)`", "", ""),
    (f"{TRAIN} --config.train.steps=100.0", r"Write (?P<to>\d+)\.", "100.0", ""),
    ("train --config=DIR/fixed.py:debug", r"remove (?P<drop>:\w+)\.", "", ""),
    ("evaluate DIR/none", r"write (?P<to>\S+)\.", "DIR/none", NO_RUN),
    ("evaluate --workdir=~nobody9/x", r"is (?P<to>\./\S+)\.", "~nobody9/x", NO_RUN),
    ("evaluate --workdir=DIR/runs", r"holds runs: (?P<to>\S+)\.", "DIR/runs", "before 0.1.0"),
    ("generate DIR/none --prompt=a", r"write (?P<to>\S+)\.", "DIR/none", NO_RUN),
    ("generate --workdir=DIR --prompt=a --prompts=DIR/p.txt", r"(?P<drop>--prompt) and", "", NO_RUN),
    ("generate --workdir=DIR --prompts=DIR/p.jsonl", r"plain lines (?P<to>\.txt)", ".jsonl", NO_RUN),
    ("niah --workdir=DIR/none --lengths=a", r"as in (?P<to>\S+)\.", "--lengths=a", NO_RUN),
    ("niah --workdir=DIR/none --lengths=8 --samples=0", r"(?P<option>--\w+)=0: .* (?P<value>\d)\.", "", NO_RUN),
    ("repeats --workdir=DIR/none --lengths=8 --samples=0", r"(?P<option>--\w+)=0: .* (?P<value>\d)\.", "", NO_RUN),
    (f"{PREPARE} --source=DIR/empty --out=DIR/x --tokenizer=bite", MEANT, "bite", "holds no"),
    (f"{PREPARE} --source=DIR/empty --out=DIR/x --domain=News!", r"e\.g\. (?P<to>\S+)\.", "--domain=News!", "holds no"),
    (f"{PREPARE} --source=DIR/empty --out=DIR/x --executor=dsk", r"give (?P<to>\w+),", "dsk", "holds no"),
    (f"{PREPARE} --source=DIR/empty --out=DIR/x --text_field=", r"e\.g\. (?P<to>\S+)\.", "--text_field=", "holds no"),
    (f"{PREPARE} --source=DIR/empty --out=DIR/x --domain=a --domain_field=b", r"^(?P<drop>\S+)", "", "holds no"),
    (f"{PREPARE} --source=DIR/link --out=DIR/x --domain=a", r"^(?P<delete>\S+) is a link", "", ""),
    (f"{PREPARE} --source=DIR/bad --out=DIR/x --domain=a --strict", r"without (?P<drop>--strict)", "", ""),
    (f"{PREPARE} --source=DIR/split --out=DIR/x --domain=a --validation=0.3", r"^(?P<drop>--\w+):", "", ""),
    (f"{PREPARE} --source=DIR/good --out=DIR/full --domain=a", r"give another (?P<another>--out)", "", ""),
    (f"{PREPARE} --source=DIR/good --out=DIR/p.txt --domain=a", r"give another (?P<another>--out)", "", ""),
    (f"{PREPARE} --source=DIR/good --out=DIR/blocks --domain=b", r"or another (?P<another>--out)", "", ""),
    (f"{PREPARE} --source=DIR/good --out=DIR/blocks --domain=b", r"(?P<delete>\S+) was begun", "", ""),
    (f"{PREPARE} --source=DIR/good --out=DIR/x", r"domain: (?P<add>--domain)=", "", ""),
    ("recall --size=dmo --out=DIR/p.txt", MEANT, "dmo", "is a file"),
    ("recall --size=demo --out=DIR/p.txt --jobs=0", r"(?P<option>--\w+)=0: .* (?P<value>\d)\.", "", "is a file"),
    ("recall --size=demo --minutes=0 --out=DIR/p.txt", r"^(?P<another>--out)=\S+ is a file", "", ""),
    ("recall --size=demo --minutes=0 --out=DIR/recall", r"Give another (?P<another>--out)", "", ""),
    ("recall --size=demo --minutes=0 --out=DIR/recall", r"with (?P<add>--report)", "", ""),
    ("recall --size=demo --minutes=0 --out=DIR/empty --report", r"without (?P<drop>--report)", "", ""),
    ("harness --workdir=gs://b/c --tasks=", r"(?P<option>--tasks): give (?P<value>\w+),", "", "--out"),
    ("convert export --workdir=DIR/none --out=DIR/x.safetensors", r"(?P<another>--out)=", "", NO_RUN),
    ("convert export --workdir=DIR/none --out=DIR/p.txt", r"(?P<another>--out)=", "", NO_RUN),
    ("convert import --workdir=DIR/x --weights=", r"(?P<value>\.)`", "", "--config"),
    ("convert import --weights=DIR/bare --workdir=DIR/x", r"give (?P<add>--config)\.", "", ""),
    ("study --study=DIR/two.py --list --only=gl", r"1 '(?P<to>\w+)'", "gl", ""),
    ("study --page", r": (?P<to>--analyse=DIR --page)\.", "--page", "no runs.json"),
    ("study --analyse=DIR/empty --list", r"leave out the (?P<drop>other)", "--list", "no runs.json"),
    ("study --study=DIR/two.py:debug --list", r"leave out '(?P<drop>:debug)'", "", ""),
    ("study --study=DIR/two.py --partial", r"pictures: (?P<add>--out)=DIR", "", "not begun"),
    ("study --study=DIR/two.py --out=DIR/x --partial --only=0", r"leave out (?P<drop>--only)", "", "not begun"),
    (
        "judge --config=NAME:debug --jobs=0 --rates=a",
        r"(?P<option>--rates)=.*such as (?P<value>[\d,e-]+)\.",
        "",
        "--jobs",
    ),
    ("judge --config=NAME:1b3", r"try, (?P<add>--rates)=", "", "no directory"),
]


@pytest.mark.parametrize(("line", "advice", "old", "then"), COMMANDS)
def test_a_command_as_the_error_advises(commands: Commands, line: str, advice: str, old: str, then: str):
    commands.follow(line, advice, old, then)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"seq_len": 8}, r"set config\.train\.(?P<key>seq_len)=(?P<to>\d+)"),
    ({"vocab_size": 100}, r"config\.model\.(?P<key>vocab_size) to at least (?P<to>\d+)"),
    ({"train_domains": ("github",)}, r"in config\.data\.(?P<key>train_domains)\. Present: (?P<to>\w+)"),
    ({"eval_domains": ("github",)}, r"in config\.data\.(?P<key>eval_domains)\. Present: (?P<to>\w+)"),
]


@pytest.mark.parametrize(("arguments", "advice"), SETTINGS, ids=[next(iter(arguments)) for arguments, _ in SETTINGS])
def test_a_setting_as_the_error_advises(tmp_path: Path, arguments: dict[str, Any], advice: str):
    make_corpus(tmp_path)
    with pytest.raises(UserError) as error:
        open_blocks(tmp_path, **arguments)
    match = re.search(advice, str(error.value))
    assert match, error
    value: Any = int(match["to"]) if match["to"].isdecimal() else (match["to"],)
    assert open_blocks(tmp_path, **arguments | {match["key"]: value}).train_domains == ("c4",)


def _check(root: Path, to: str = "run", **changed: Any) -> Any:
    config = workdir.load_config(root / "run")
    return workdir.check_config(root / to, dataclasses.replace(config, **changed))


def _locked(root: Path, to: str = "run") -> None:
    with lock.locked(root / to):
        pass


def _outside(root: Path) -> None:
    shutil.move(unpack_run(root) / "eval_losses", root / "elsewhere")
    (root / "run" / "eval_losses").symlink_to(root / "elsewhere")


def _in_place_of_a_link(root: Path, match: re.Match[str]) -> None:
    (link := Path(match["link"])).unlink()
    shutil.move(match["path"], link)


def _link_itself(root: Path, match: re.Match[str]) -> Callable[[], Any]:
    (link := Path(match["link"])).unlink()
    shutil.move(match["path"], link)
    (root / "linked").symlink_to(root / "run")
    return lambda: mirrors.require_inside(root / "linked")


def _batch(size: int, accumulate: int | None = None) -> Callable[[Path], int]:
    def attempt(_: Path) -> int:
        config = from_config_dict(presets.read_config("gla:debug"))
        mesh = sharding.make_mesh()
        return step.micro_batches(dataclasses.replace(config.train, batch_size=size, accumulate=accumulate), mesh)

    return attempt


def _strict(root: Path, out: str = "x") -> None:
    bad, form = root / "bad", layout.Layout(domain="a")
    prepare(str(bad), root / out, tokenizer="byte", layout=form, seq_len=16, workers=1, strict=True)


def _without_the_line(root: Path, match: re.Match[str]) -> Callable[[], None]:
    path = root / "bad" / match["file"]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text for i, text in enumerate(lines, start=1) if i != int(match["line"])))
    return lambda: _strict(root, "new")


def _measured(again: Collection[str] = (), out: str = "out") -> Callable[[Path], list[str]]:
    def attempt(root: Path) -> list[str]:
        match = results.read(root / out)
        return results.to_measure(match, {"copa": {"step": 2}}, again=again, out=root / out)

    return attempt


def _prompts(text: str, name: str = "p.txt") -> Callable[[Path], None]:
    return lambda root: write(root / name, text)


def _read_prompts(root: Path) -> Any:
    [path] = root.glob("p.*")
    return generate.read_prompts(path)


def _lines(root: Path, match: re.Match[str]) -> None:
    """Delete the lines of a task from recall's results."""
    path = Path(match["path"])
    kept = [line for line in path.read_text().splitlines(True) if f'"task": "{match["task"]}"' not in line]
    path.write_text("".join(kept))


FILES: dict[str, Case] = {
    "no blocks": (write_source, open_blocks, MAKE, run_command),
    "a block file is missing": (
        lambda root: first_file(make_corpus(root), "train/**/*").unlink(),
        open_blocks,
        "delete the directory.*" + MAKE,
        prepare_again,
    ),
    "a block file is cut": (
        lambda root: cut(first_file(make_corpus(root), "train/**/*")),
        open_blocks,
        r"delete \S+ and .*" + MAKE,
        prepare_again,
    ),
    "the manifest is cut": (
        lambda root: cut(make_corpus(root) / "manifest.json"),
        open_blocks,
        "delete the directory.*" + MAKE,
        prepare_again,
    ),
    "no manifest": (
        lambda root: (make_corpus(root) / "manifest.json").unlink(),
        open_blocks,
        MAKE,
        lambda root, match: [run_command(root, match), lambda: open_blocks(root, "new")][1],
    ),
    "no documents": (
        lambda root: (make_corpus(root) / "documents.npz").unlink(),
        open_blocks,
        "into another (?P<option>--out)",
        lambda root, _: [prepare_blocks(root, root / "new"), lambda: open_blocks(root, "new")][1],
    ),
    "a line without text": (
        FOUND["bad"],
        _strict,
        r"(?P<file>\S+):(?P<line>\d+): .*another (?P<option>--out)",
        _without_the_line,
    ),
    "an unfinished preparation": (
        lambda root: [write_source(root), write(root / "corpus" / ".parts" / "x", "")],
        open_blocks,
        "the same `seqjax prepare` command",
        lambda root, _: [shutil.rmtree(root / "corpus"), prepare_blocks(root, root / "corpus")][1],
    ),
    "another config": (
        unpack_run,
        lambda root: _check(root, name="other"),
        "another (?P<option>--workdir)",
        lambda root, _: lambda: _check(root, "new", name="other"),
    ),
    "another config, the old value": (
        unpack_run,
        lambda root: _check(root, name="other"),
        r"name: '(?P<was>\w+)'.*Give the old values",
        lambda root, match: lambda: _check(root, name=match["was"]),
    ),
    "a file as a workdir": (
        lambda root: [unpack_run(root), write(root / "file", "")],
        lambda root: _check(root, "file"),
        "--workdir=.* give a directory",
        lambda root, _: lambda: _check(root, "new"),
    ),
    "a lock in a file": (
        lambda root: write(root / "run", ""),
        _locked,
        "--workdir=.* give a directory",
        lambda root, _: lambda: _locked(root, "new"),
    ),
    "no config": (
        lambda root: [
            unpack_run(root),
            shutil.copytree(root / "run", root / "old"),
            (root / "old" / "config.json").unlink(),
        ],
        lambda root: _check(root, "old"),
        "another (?P<option>--workdir)",
        lambda root, _: lambda: _check(root, "new"),
    ),
    "no checkpoints": (
        lambda root: shutil.rmtree(unpack_run(root) / "checkpoints"),
        lambda root: metrics.require_checkpoint(mirrors.Mirror(root / "run")),
        r"here, move (?P<path>\S+) away",
        move,
    ),
    "a directory of the run is elsewhere": (
        _outside,
        lambda root: mirrors.require_inside(root / "run"),
        r"(?P<link>\S+) is a link to (?P<path>\S+),.* Move eval_losses",
        _in_place_of_a_link,
    ),
    "the workdir itself is a link": (
        _outside,
        lambda root: mirrors.require_inside(root / "run"),
        r"(?P<link>\S+) is a link to (?P<path>\S+),.* the workdir itself a link",
        _link_itself,
    ),
    "a mesh of no such size": (
        lambda _: None,
        lambda _: sharding.make_mesh(data=3),
        r"set one size to (?P<size>-1)",
        lambda _, match: lambda: sharding.make_mesh(data=int(match["size"])),
    ),
    "a batch that is not divided": (
        lambda _: None,
        _batch(9),
        r"fit are (?P<size>\d+)",
        lambda root, match: lambda: _batch(int(match["size"]))(root),
    ),
    "micro-batches that are not divided": (
        lambda _: None,
        _batch(16, 4),
        r"Give (?P<none>None)",
        lambda root, _: lambda: _batch(16, None)(root),
    ),
    "prompts without a line": (
        _prompts("\n"),
        _read_prompts,
        "--prompts=(?P<path>\\S+) holds",
        lambda _, match: Path(match["path"]).write_text("a line\n"),
    ),
    "prompts of another form": (
        _prompts("a line\n", "p.jsonl"),
        _read_prompts,
        r"(?P<path>\S+), line 1 .*write (?P<line>\{.*\}),",
        lambda _, match: Path(match["path"]).write_text(match["line"] + "\n"),
    ),
    "a bucket without a name": (
        lambda _: None,
        lambda _: store.require_workdir("gs://"),
        r"write (?P<url>\S+)\.",
        lambda _, match: lambda: store.require_workdir(match["url"]),
    ),
    "a result of another checkpoint, again": (
        lambda root: write(root / "out" / "copa.json", RESULT),
        _measured(),
        "(?P<option>--again)",
        lambda root, _: lambda: _measured(["copa"])(root),
    ),
    "a result of another checkpoint, elsewhere": (
        lambda root: write(root / "out" / "copa.json", RESULT),
        _measured(),
        "another (?P<option>--out)",
        lambda root, _: lambda: _measured(out="new")(root),
    ),
    "recall of another size": (
        lambda root: write(root / "runs.jsonl", OTHER_SIZE),
        lambda root: recall.require_same_settings(recall.SETUPS["demo"], root),
        r"(?P<path>\S+) has results for (?P<task>\w+) .*delete these lines",
        _lines,
    ),
}


RESULT = '{"seqjax": {"task": "copa", "step": 1}, "results": {}}'


OTHER_SIZE = (
    (GOLDEN / "recall" / "runs.jsonl").read_text().replace('"task": "mqar", "asked": "', '"task": "mqar", "asked": "0')
)


@pytest.mark.parametrize("name", FILES)
def test_files_as_the_error_advises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    follow_case(tmp_path, FILES[name])
