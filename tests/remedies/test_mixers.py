"""The remedies in errors about settings, mixers and kernels are followed."""

import re
from typing import Any

import pytest

from seqjax.config import from_config_dict, presets
from seqjax.errors import UserError

# A config, its wrong settings, the advice in the error, and settings that follow it. They may use what the advice
# names: `{n}`. A setting whose value is "-" is left out.
Row = tuple[str, dict[str, str], str, dict[str, str]]
SETTINGS: list[Row] = [
    ("transformer_pp", {"mixer.heads": "0"}, r"at least (?P<n>\d+)", {"mixer.heads": "{n}"}),
    ("transformer_pp", {"mixer.heads": "5"}, r"not divide \S+dim=(?P<n>\d+); choose heads", {"mixer.heads": "4"}),
    ("transformer_pp", {"mixer.heads": "5"}, "or set head_dim", {"mixer.head_dim": "8"}),
    ("transformer_pp", {"mixer.heads": "4", "mixer.kv_heads": "3"}, "must divide heads", {"mixer.kv_heads": "2"}),
    ("transformer_pp", {"mixer.heads": "64"}, "set an even head_dim", {"mixer.head_dim": "2"}),
    ("path", {"mixer.heads": "5"}, "or set head_dim", {"mixer.head_dim": "8"}),
    (
        "transformer_pp",
        {"mixer.rope_scaling": "llama3", "mixer.rope_factor": "0.5"},
        r"at least (?P<n>\d)",
        {"mixer.rope_factor": "{n}"},
    ),
    (
        "transformer_pp",
        {"mixer.rope_scaling": "llama3", "mixer.rope_low_freq_factor": "9"},
        "less than rope_high_freq_factor",
        {"mixer.rope_high_freq_factor": "10"},
    ),
    *(
        (
            "transformer_pp",
            {"mixer.implementation": "cudnn", "mixer.const": "qk"},
            f"Choose .*(?P<n>{choice})",
            {"mixer.implementation": "{n}"},
        )
        for choice in ("None", "xla")
    ),
    ("transformer_pp", {"mixer.temperature": "-1"}, "or (?P<n>None)", {"mixer.temperature": "{n}"}),
    ("transformer_pp", {"mixer.qk_norm_eps": "2"}, "between 0 and 1", {"mixer.qk_norm_eps": "0.5"}),
    ("mamba1", {"mixer.expand": "0"}, r"at least (?P<n>\d+)", {"mixer.expand": "{n}"}),
    ("mamba2", {"mixer.head_dim": "7"}, r"inner width (?P<n>\d+)", {"mixer.head_dim": "{n}"}),
    ("gla", {"mixer.heads": "5"}, r"width (?P<n>\d+) of its key_dim; choose heads", {"mixer.heads": "{n}"}),
    ("deltanet", {"mixer.heads": "5", "mixer.value_dim": "40"}, "or set key_dim", {"mixer.key_dim": "40"}),
    ("based", {"mixer[1].heads": "5"}, r"not divide \S+dim=(?P<n>\d+); choose heads", {"mixer[1].heads": "{n}"}),
    ("based", {"mixer.heads": "4"}, r"choose one: model\.(?P<key>\S+)\.\B", {"mixer.heads": "-", "{key}": "4"}),
    ("fox", {"mixer.window": "0"}, "or (?P<n>None) for all", {"mixer.window": "{n}"}),
    ("fox", {"mixer.window": "0"}, r"at least (?P<n>\d)", {"mixer.window": "{n}"}),
    ("fox", {"mixer.norm_eps": "2"}, "between 0 and 1", {"mixer.norm_eps": "0.5"}),
    ("mlstm", {"mixer.gate_cap": "40"}, r"at most (?P<n>\d+)", {"mixer.gate_cap": "{n}"}),
    ("nsa", {"mixer.block_size": "999"}, r"1 to (?P<n>\d+) tokens", {"mixer.block_size": "{n}"}),
    ("nsa", {"mixer.block_size": "999"}, r"train\.(?P<key>seq_len).* or longer sequences", {"train.{key}": "999"}),
    ("rwkv5", {"mixer.head_dim": "7"}, r"divide \S+dim=(?P<n>\d+)", {"mixer.head_dim": "{n}"}),
    ("rwkv7", {"mixer.heads": "5"}, r"not divide \S+dim=(?P<n>\d+); choose heads", {"mixer.heads": "{n}"}),
    ("rwkv7", {"mixer.chunk_size": "500"}, r"1 to (?P<n>\d+)", {"mixer.chunk_size": "{n}"}),
    *(
        ("rwkv7_shell", {"mixer.core": "window", "mixer.window": "0"}, advice, {key: "{n}"})
        for advice, key in ((r"at least (?P<n>\d)", "mixer.window"), (r"or core=(?P<n>\w+)", "mixer.core"))
    ),
    *(
        (
            "top1_chunk",
            {"mixer.selection": "shortlist", "mixer.table": "sub_means", "mixer.chunk_size": "9"},
            advice,
            {key: "{n}"},
        )
        for advice, key in ((r"multiple of (?P<n>\d)", "mixer.chunk_size"), (r"table=(?P<n>\w+)\.", "mixer.table"))
    ),
    ("top1_chunk", {"mixer.top_k": "9"}, r"or smaller chunks.*full attention, (?P<n>\w+)", {"mixer.chunk_size": "8"}),
    ("top1_chunk", {"mixer.chunk_size": "999"}, r"train\.(?P<key>seq_len).* longer", {"train.{key}": "999"}),
    (
        "gla",
        {"checkpoint.every": "10", "checkpoint.keep_period": "15"},
        "multiple of",
        {"checkpoint.keep_period": "20"},
    ),
    ("gla", {"train.batch_size": "8", "train.accumulate": "3"}, "multiple of", {"train.batch_size": "9"}),
    *(
        ("gla", {"data.corpus": corpus}, r"needs config\.(?P<key>data\.path)", {"{key}": "somewhere"})
        for corpus in ("blocks", "stream")
    ),
    ("gla", {"data.weights": "1,2"}, r"(?P<n>\d) values for .* with one weight", {"data.train_domains": "a,b"}),
    ("based", {"n_layers": "4"}, r"(?P<n>\d) mixers, which do not divide", {"n_layers": "{n}"}),
    ("gla", {"name": "a/b"}, "without slashes", {"name": "a_b"}),
    ("gla", {"train.batch_size": "9999999"}, r"seq_len=\d+ exceed \S+ tokens.* reduce one", {"train.seq_len": "16"}),
    ("gla", {"train.batch_size": "9999999"}, r"batch_size=\d+ .* reduce one", {"train.batch_size": "8"}),
    ("rwkv7", {"model.canon": "A"}, r"set config\.model\.canon='(?P<n>\w+)'", {"model.canon": "{n}"}),
    ("gla", {"train.ends": "0.9,0.5"}, r"such as (?P<n>\(.*\))", {"train.ends": "{n}", "train.steps": "100"}),
    *(
        ("gla", {"train.ends": "0.3,1", "train.steps": "100", "optim.warmup_steps": "28"}, advice, {key: value})
        for advice, key, value in (
            ("later first end", "train.ends", "0.5,1"),
            ("shorter warmup", "optim.warmup_steps", "9"),
            (r"smaller config\.(?P<key>optim\.cooldown)", "{key}", "0.02"),
        )
    ),
    ("gla", {"train.ends": "1"}, r"must be a list.*write (?P<n>\(.*\))", {"train.ends": "{n}"}),
    ("gla", {"n_layers": "0"}, r"at least (?P<n>\d)", {"n_layers": "{n}"}),
    ("gla", {"mlp.kind": "relu"}, r"Known: .*(?P<n>gelu)", {"mlp.kind": "{n}"}),
    ("gla", {"model.mixer.name": ""}, r"name of a mixer\. Known: .* (?P<n>fox),", {"model.mixer.name": "{n}"}),
]


def _config(name: str, settings: dict[str, str]) -> Any:
    groups = ("model", "data", "train", "optim", "eval", "checkpoint", "log", "mesh", "name")
    full = [(k if k.partition(".")[0] in groups else f"model.{k}", v) for k, v in settings.items() if v != "-"]
    return from_config_dict(presets.read_config(f"{name}:debug", full))


@pytest.mark.parametrize(("name", "wrong", "advice", "right"), SETTINGS)
def test_a_setting_as_the_error_advises(name: str, wrong: dict[str, str], advice: str, right: dict[str, str]):
    with pytest.raises(UserError) as error:
        _config(name, wrong)
    found = re.search(advice, str(error.value))
    assert found, error
    words = found.groupdict()
    given = {key.format(**words): value.format(**words) for key, value in right.items()}
    for key in given:
        assert key.rpartition(".")[2] in str(error.value), f"{error.value} does not name {key}"
    _config(name, wrong | given)
