"""Follow the remedy in an error message.

A remedy is taken from the text of the error: a setting, an option, a command in backticks, a path to delete or move.
"""

import re
import shlex
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqjax.commands import cli, train
from seqjax.config import DataConfig, from_config_dict, presets
from seqjax.data import layout, open_corpus
from seqjax.data.prepare import prepare
from seqjax.errors import UserError
from tests.remedies.follow import write

GOLDEN = Path(__file__).parent.parent / "golden"


MEANT = r"Did you mean '(?P<to>[^']+)'"


NO_RUN = "no config.json"


LINE = '{"text": "hello world, hello world, hello world, number %d"}\n'


# Values for options that an error names without one.
VALUES = {
    "--config": "=transformer_pp:debug,model.dim=24,model.n_layers=3,model.tie_embeddings=False,model.vocab_size=264,"
    "model.mixer.heads=4,model.mlp.dim=40,model.mixer.kv_heads=2,model.mixer.head_dim=6",
    "--domain": "=a",
    "--out": "=DIR/new",
    "--rates": "=1e-3,2e-3",
    "--workdir": "=DIR/new",
}


STUDY = """
from seqjax.config import presets
def get_study():
    runs = {name: {"workdir": f"DIR/{name}", "config": f"{name}:debug"} for name in ("top1_chunk", "gla")}
    return {"title": "two", "references": ("gla",), "domains": ("arxiv",), "runs": runs}
"""


def _good(root: Path) -> None:
    write(root / "good" / "a.jsonl", "".join(LINE % i for i in range(9)))


def _full(root: Path) -> None:
    _good(root)
    write(root / "full" / "note.txt", "mine")


def _link(root: Path) -> None:
    write(root / "link" / "a.jsonl", LINE % 1)
    (root / "link" / "b.jsonl").symlink_to(root / "none")


def _split(root: Path) -> None:
    for folder in ("train", "validation"):
        write(root / "split" / folder / "a.jsonl", LINE % 1)


def _blocks(root: Path) -> None:
    _good(root)
    prepare(
        str(root / "good"), root / "blocks", tokenizer="byte", layout=layout.Layout(domain="a"), seq_len=16, workers=1
    )


def _public(root: Path, to: str, *names: str) -> None:
    (root / to).mkdir()
    for name in names:
        shutil.copy(GOLDEN / "convert" / "llama" / name, root / to / name)


def _two(root: Path) -> None:
    _public(root, "two", "config.json", "model.safetensors")
    (root / "two" / "model.safetensors").rename(root / "two" / "a.safetensors")
    shutil.copy(root / "two" / "a.safetensors", root / "two" / "b.safetensors")


# What a command finds in its directory, by the name in its line.
FOUND: dict[str, Callable[[Path], Any]] = {
    "fixed.py": lambda root: write(
        root / "fixed.py",
        "from seqjax.config import presets\ndef get_config():\n    return presets.get_config('debug', name='x', "
        "mixer={'name': 'gla'})\n",
    ),
    "runs": lambda root: write(root / "runs" / "a" / "config.json", "{}"),
    "p.txt": lambda root: write(root / "p.txt", "a line\n"),
    "p.jsonl": lambda root: [write(root / name, "a line\n") for name in ("p.jsonl", "p.txt")],
    "empty": lambda root: (root / "empty").mkdir(),
    "good": _good,
    "full": _full,
    "link": _link,
    "bad": lambda root: write(root / "bad" / "a.jsonl", '{"text": 3}\n' + LINE % 1),
    "split": _split,
    "blocks": _blocks,
    "recall": lambda root: shutil.copytree(GOLDEN / "recall", root / "recall"),
    "bare": lambda root: _public(root, "bare", "model.safetensors"),
    "two": _two,
    "two.py": lambda root: write(root / "two.py", STUDY.replace("DIR", str(root))),
}


def _followed(line: str, words: dict[str, str], old: str) -> str:
    """Return the command as the named groups `words` of the advice change it; delete a path that it names."""
    [(how, text), *more] = words.items()
    if how == "to":
        return line.replace(old, text)
    if how == "delete":
        shutil.rmtree(path) if (path := Path(text)).is_dir() and not path.is_symlink() else path.unlink()
        return line
    if how == "value":  # the option is the last word
        return f"{line}{text}"
    if how == "option":
        text = text if text.startswith("--") else f"--{text}"
        return re.sub(rf"{re.escape(text)}=\S*", f"{text}={more[0][1]}", line)
    if how == "another":
        return re.sub(rf"{text}=\S+", f"{text}=DIR/another", line)
    line = line.replace(old, "") if old else line
    if how == "add":
        text += VALUES.get(text, "")
        return f"{line} {text if text.startswith('--') else f'--config.model.mixer.{text}'}"
    return re.sub(rf"{re.escape(text)}(=\S*)?(?= |$)", "", line)


def write_source(root: Path) -> None:
    for folder in ("train", "validation"):
        write(root / "source" / folder / "c4" / "a.jsonl", LINE % 1)


def make_corpus(root: Path) -> Path:
    write_source(root)
    prepare_blocks(root, root / "corpus")
    return root / "corpus"


def prepare_blocks(root: Path, out: Path) -> None:
    prepare(str(root / "source"), out, tokenizer="byte", seq_len=16, workers=1)


def open_blocks(root: Path, path: str = "corpus", **arguments: Any) -> Any:
    settings: dict[str, Any] = {"seq_len": 16, "vocab_size": 264}
    data: dict[str, Any] = {"train_domains": ("c4",), "eval_domains": ("c4",)}
    for key, value in arguments.items():
        (settings if key in settings else data)[key] = value
    return open_corpus(DataConfig(corpus="blocks", path=str(root / path), tokenizer="byte", **data), **settings)


def unpack_run(root: Path) -> Path:
    """Unpack a run as `root`/run."""
    with zipfile.ZipFile(GOLDEN / "workdirs" / "plain.zip") as packed:
        packed.extractall(root / "run")
    return root / "run"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def run_command(root: Path, match: re.Match[str]) -> None:
    """Run the `seqjax prepare` command in an error, with its source and tokenizer filled in."""
    words = shlex.split(match["command"].replace("--source=...", f"--source={root}/source").replace("NEW_DIR", "new"))
    assert words[:2] == ["seqjax", "prepare"]
    cli.run([*words[1:-1], "--tokenizer=byte", "--seq_len=16", "--workers=1"])


def prepare_again(root: Path, match: re.Match[str]) -> None:
    shutil.rmtree(root / "corpus")
    run_command(root, match)


def move(root: Path, match: re.Match[str]) -> None:
    Path(match["path"]).rename(root / "moved")


MAKE = r"`(?P<command>seqjax prepare [^`]+)`"


def first_file(root: Path, pattern: str) -> Path:
    return min(path for path in root.glob(pattern) if path.is_file())


# Prepare the files; an attempt that fails; the advice in its error; follow the advice. Then the attempt succeeds, or
# the call that the last function returns.
Case = tuple[Callable[[Path], Any], Callable[[Path], Any], str, Callable[[Path, re.Match[str]], Any]]


class Commands:
    """Run commands in a test's directory; `train` only reads its config."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        def read(arguments: Any, overrides: list[tuple[str, str]], **_: Any) -> None:
            from_config_dict(presets.read_config(arguments.config, overrides))

        monkeypatch.setattr(train, "run", read)
        monkeypatch.chdir(root)
        self._root, self._capsys = root, capsys

    def error_of(self, line: str) -> str:
        """Return what the command prints to stderr if it fails, else ""."""
        line = line.replace("DIR", str(self._root)).replace("NAME", "top1_chunk")
        try:
            cli.run(shlex.split(line))
        except SystemExit as ended:
            assert ended.code == 2
            return self._capsys.readouterr().err.replace("NAME", "top1_chunk")
        self._capsys.readouterr()
        return ""

    def follow(self, line: str, advice: str, old: str, then: str) -> None:
        """Cause the error of `line`, follow its `advice`, and see the error `then`, or success if it is ""."""
        for name in {*re.findall(r"DIR/([\w.]+)", line)} & {*FOUND}:
            FOUND[name](self._root)
        line, old = (text.replace("NAME", "top1_chunk").replace("DIR", str(self._root)) for text in (line, old))
        match = re.search(advice, before := self.error_of(line).rpartition("error: ")[2])
        assert match, before
        after = self.error_of(_followed(line, match.groupdict(), old))
        assert (then in after) if then else not after, after
        assert after != before


def follow_case(root: Path, case: Case) -> None:
    """Prepare the files of a case, see the attempt fail, follow the advice, and see it succeed."""
    spoil, attempt, advice, follow = case
    spoil(root)
    with pytest.raises(UserError) as error:
        attempt(root)
    match = re.search(advice, str(error.value))
    assert match, error
    instead = follow(root, match)
    instead() if callable(instead) else attempt(root)
