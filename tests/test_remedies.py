"""The commands and settings that error messages advise are tried: the error is gone, or the next step is reached."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from seqjax.commands import cli, train
from seqjax.config import DataConfig, from_config_dict, presets
from seqjax.data import open_corpus
from seqjax.errors import UserError

MEANT = r"Did you mean '(?P<to>[^']+)'"
NO_RUN = "no config.json"

# A command, the advice in its error (`to`), the word that the advice replaces ("" adds it), and the error of the next
# step, "" if the command then works.
COMMANDS: list[tuple[str, str, str, str]] = [
    ("trian --config=top1_chunk:debug", MEANT, "trian", ""),
    ("train --config=top1_chnk:debug", MEANT, "top1_chnk", ""),
    ("train top1_chunk:debug", r"write (?P<to>\S+)\.", "top1_chunk:debug", ""),
    ("train --config=top1_chunk:debug --lr=3", r"write (?P<to>\S+)\.", "--lr=3", ""),
    ("train --config=top1_chunk:debug optim.lr=3", r"write (?P<to>\S+)\.", "optim.lr=3", ""),
    ("train --config=top1_chunk:debug --dim=64", r"write (?P<to>\S+) or", "--dim=64", ""),
    ("train --config=top1_chunk:debug --dim=64", r" or (?P<to>\S+)\.", "--dim=64", ""),
    ("train --config=top1_chunk:debug --config.optim.lrr=3", MEANT, "lrr", ""),
    ("train --config=top1_chunk:debug --wordir=x", r"Did you mean (?P<to>--\w+)\?", "--wordir", ""),
    (
        "train --config=NAME:debug,data.train_domains=c4,arxiv",
        r"quotes: '(?P<to>\S+)'",
        "--config=NAME:debug,data.train_domains=c4,arxiv",
        "",
    ),
    (
        "train --config=NAME:debug,data.train_domains=c4,arxiv",
        r"or (?P<to>--config\.\S+) apart",
        ",data.train_domains=c4,arxiv",
        "",
    ),
    (
        "train --config=NAME:debug --config.train.ends=0.5,1 --config.optim.cooldown=0",
        r"such as (?P<to>0\.\d+)",
        "--config.optim.cooldown=0",
        "",
    ),
    (
        "train --config=NAME:debug --config.data.corpus=tfds",
        r"(?P<to>--config\.data\.corpus=tfds --config.data.tfds=\S+)",
        "--config.data.corpus=tfds",
        "",
    ),
    ("evaluate DIR/none", r"write (?P<to>\S+)\.", "DIR/none", NO_RUN),
    ("evaluate --workdir=~nobody9/x", r"is (?P<to>\./\S+)\.", "~nobody9/x", NO_RUN),
    ("generate DIR/none --prompt=a", r"write (?P<to>\S+)\.", "DIR/none", NO_RUN),
    ("niah --workdir=DIR/none --lengths=a", r"as in (?P<to>\S+)\.", "--lengths=a", NO_RUN),
    ("prepare --source=DIR --out=DIR/x --tokenizer=bite", MEANT, "bite", "holds no"),
    (
        "prepare --source=DIR --out=DIR/x --tokenizer=byte --domain=News!",
        r"e\.g\. (?P<to>\S+)\.",
        "--domain=News!",
        "no ",
    ),
    ("prepare --source=DIR --out=DIR/x --tokenizer=byte --executor=dsk", r"give (?P<to>\w+),", "dsk", "holds no"),
    ("study --study=figur2a --list", MEANT, "figur2a", ""),
]


@pytest.mark.parametrize(("line", "advice", "old", "then"), COMMANDS)
def test_a_command_as_the_error_advises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    advice: str,
    old: str,
    then: str,
):
    def read(given: Any, overrides: list[tuple[str, str]], **_: Any) -> None:
        from_config_dict(presets.read_config(given.config, overrides))

    def error_of(words: list[str]) -> str:
        try:
            cli.run(words)
        except SystemExit as ended:
            assert ended.code == 2
            return capsys.readouterr().err
        return ""

    monkeypatch.setattr(train, "run", read)
    monkeypatch.chdir(tmp_path)
    line = line.replace("DIR", str(tmp_path)).replace("NAME", "top1_chunk")
    found = re.search(advice, (before := error_of(line.split())).replace("NAME", "top1_chunk"))
    assert found, before
    new, old = found["to"], old.replace("DIR", str(tmp_path)).replace("NAME", "top1_chunk")
    if old.startswith(",") or new.startswith("0."):  # a setting moves out of --config, or has another value
        new = f" {new}" if old.startswith(",") else f"{old.partition('=')[0]}={new}"
    after = error_of(shlex.split(line.replace(old, new)))
    assert (then in after) if then else not after, after
    assert after != before


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"seq_len": 8}, r"set config\.train\.(?P<key>seq_len)=(?P<to>\d+)"),
    ({"vocab_size": 100}, r"config\.model\.(?P<key>vocab_size) to at least (?P<to>\d+)"),
]


@pytest.mark.parametrize(("given", "advice"), SETTINGS, ids=[next(iter(given)) for given, _ in SETTINGS])
def test_a_setting_as_the_error_advises(tmp_path: Path, given: dict[str, Any], advice: str):
    from seqjax.data import prepare

    for folder in ("train", "validation"):
        (tmp_path / "source" / folder / "c4").mkdir(parents=True)
        (tmp_path / "source" / folder / "c4" / "a.jsonl").write_text('{"text": "%s"}\n' % (folder * 40))
    prepare.prepare(str(tmp_path / "source"), tmp_path / "out", tokenizer="byte", seq_len=16, workers=1)
    config = DataConfig(
        corpus="blocks", path=str(tmp_path / "out"), tokenizer="byte", train_domains=("c4",), eval_domains=("c4",)
    )
    settings: dict[str, Any] = {"seq_len": 16, "vocab_size": 264} | given
    with pytest.raises(UserError) as error:
        open_corpus(config, **settings)
    found = re.search(advice, str(error.value))
    assert found, error
    fixed: dict[str, Any] = settings | {found["key"]: int(found["to"])}
    assert open_corpus(config, **fixed).train_domains == ("c4",)
