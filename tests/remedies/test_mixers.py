"""The remedies in errors about settings, mixers and kernels are followed."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import kernels_pallas as kp
from kernels_pallas import backend, outside
from seqjax import mixers, sharding
from seqjax.command_line import explained
from seqjax.config import from_config_dict, presets
from seqjax.errors import UserError
from seqjax.mixers import _registry, base
from seqjax.ops.straight_through import straight_through
from tests.remedies.follow import write
from tests.remedies.support import MEANT

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
    ("transformer_pp", {"mixer.rope_share": "0.3"}, r"such as (?P<n>0\.\d+)", {"mixer.rope_share": "{n}"}),
    *(
        ("transformer_pp", {"mixer.rope_share": "0.5", "mixer.position": "none"}, advice, {key: "{n}"})
        for advice, key in (
            (r"needs position=(?P<n>\w+)", "mixer.position"),
            (r"set rope_share=(?P<n>\d)", "mixer.rope_share"),
        )
    ),
    ("mla", {"mixer.heads": "5"}, "or set head_dim", {"mixer.head_dim": "8"}),
    *(
        ("mla", {"mixer.shared_dim": "3"}, advice, {key: value})
        for advice, key, value in (
            ("set an even shared_dim", "mixer.shared_dim", "4"),
            (r"or position=(?P<n>\w+)", "mixer.position", "{n}"),
        )
    ),
    ("mla", {"mixer.norm_eps": "2"}, "between 0 and 1", {"mixer.norm_eps": "0.5"}),
    (
        "gated_deltanet",
        {"mixer.heads": "2", "mixer.value_heads": "3"},
        r"such as (?P<n>\d+)",
        {"mixer.value_heads": "{n}"},
    ),
    *(
        ("kda", {"mixer.gate_rank": "0"}, advice, {"mixer.gate_rank": "{n}"})
        for advice in (r"1 to (?P<n>\d+)", "or '(?P<n>full)'")
    ),
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
    ("msa", {"mixer.blocks": "1"}, r"at least (?P<n>\d)", {"mixer.blocks": "{n}"}),
    ("msa", {"mixer.blocks": "99"}, r"choose at most (?P<n>\d+)", {"mixer.blocks": "{n}"}),
    ("msa", {"mixer.blocks": "99"}, "or smaller blocks", {"mixer.block_size": "1"}),
    ("dsa", {"mixer.top_k": "999"}, r"choose at most (?P<n>\d+)", {"mixer.top_k": "{n}"}),
    ("dsa", {"mixer.index_rope": "3"}, r"Set (?P<n>\d) for an index", {"mixer.index_rope": "{n}"}),
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
    ("gla", {"optim.adam_lr": "1e-3"}, r"set config\.(?P<key>optim\.name)='(?P<n>\w+)'", {"{key}": "{n}"}),
    ("gla", {"optim.muon_scale": "rms"}, "or leave it out", {"optim.muon_scale": "-"}),
    ("gla", {"optim.name": "muon", "optim.adam_lr": "1e-3", "optim.lr": "0"}, "set it above 0", {"optim.lr": "0.02"}),
    *(
        (
            "gla",
            {"optim.schedule": "cosine", "optim.warmup_steps": "1", "train.ends": "0.5,1"},
            r"Leave one of them out",
            {key: "-"},
        )
        for key in ("optim.schedule", "train.ends")
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
    match = re.search(advice, str(error.value))
    assert match, error
    words = match.groupdict()
    arguments = {key.format(**words): value.format(**words) for key, value in right.items()}
    for key in arguments:
        assert key.rpartition(".")[2] in str(error.value), f"{error.value} does not name {key}"
    _config(name, wrong | arguments)


# ------------------------------------------------------------------------------------------------------------- kernels
# An op, its arguments (a tuple of sizes is an array), the advice in the error, and arguments that follow it.
SELECT = {"q_BTHK": (2, 16, 4, 8), "k_BTGK": (2, 16, 2, 8)}
QKV = SELECT | {"v_BTGK": (2, 16, 2, 8)}
DECODE = {"q_BHK": (2, 4, 8), "k_BSGK": (2, 16, 2, 8), "v_BSGV": (2, 16, 2, 8), "length": 3, "chunk_size": 4}
CONV = {"x_BTE": (2, 6, 8), "w_EW": (8, 4), "silu": True}
RKV = {"r_BTHK": (1, 4, 2, 4), "k_BTHK": (1, 4, 2, 4), "v_BTHV": (1, 4, 2, 4), "log_w_BTHK": (1, 4, 2, 4)}
NORM = {"x_BTHV": (2, 4, 2, 8), "gain_HV": (2, 8)}
OF_7 = {"r_BTHK": (1, 4, 2, 4), "k_BTHK": (1, 4, 2, 4), "v_BTHK": (1, 4, 2, 4)}
OF_7 |= {key: [(1, 4, 3), (3, 8), (8,)] for key in ("decay", "eta")} | dict.fromkeys(("k_k_D", "k_a_D", "r_k_D"), (8,))
OF_MAMBA3 = {"b_BTN": (1, 4, 8), "c_BTN": (1, 4, 8), "turn_BTR": (1, 4, 2), "dt_BTH": (1, 4, 2), "before_BN": (1, 8)}
OF_MAMBA3 |= {"b_bias_HN": (2, 8), "c_bias_HN": (2, 8), "start_BHR": (1, 2, 2)}
KERNELS: list[tuple[Callable[..., Any], dict[str, Any], str, dict[str, Any]]] = [
    (
        kp.causal_attention,
        QKV | {"q_BTHK": (2, 16, 4)},
        r"q must be \[batch, time, heads, dim",
        {"q_BTHK": (2, 16, 4, 8)},
    ),
    (kp.causal_attention, dict.fromkeys(QKV, (2, 0, 4, 8)), r"T must be at least 1", dict.fromkeys(QKV, (2, 1, 4, 8))),
    (kp.causal_attention, QKV | {"k_BTGK": (2, 9, 2, 8)}, "k must share .* time .*with q", {"k_BTGK": (2, 16, 2, 8)}),
    (kp.causal_attention, QKV | {"v_BTGK": (2, 16, 1, 8)}, "v must share .* heads with k", {"v_BTGK": (2, 16, 2, 8)}),
    (
        kp.causal_attention,
        QKV | {"q_BTHK": (2, 16, 3, 8)},
        "3 query heads .* 2 key-value heads: the second must divide",
        {"q_BTHK": (2, 16, 4, 8)},
    ),
    (
        kp.causal_attention,
        QKV | {"log_f_BTH": (2, 16, 2)},
        r"log_f must be \[batch, time, query heads",
        {"log_f_BTH": (2, 16, 4)},
    ),
    (
        kp.top1_chunk_attention,
        SELECT | {"v_BTGV": SELECT["k_BTGK"], "chunk_size": 0},
        "chunk_size must be at least 1",
        {"chunk_size": 1},
    ),
    (kp.select_chunk, SELECT | {"top_k": 0}, "top_k must be at least 1", {"top_k": 1}),
    (
        kp.select_chunk,
        SELECT | {"selection": "shortlist", "shortlist": 1, "top_k": 2},
        r"set shortlist to (?P<shortlist>\d+)",
        {},
    ),
    (
        kp.select_chunk,
        SELECT | {"selection": "shortlist", "table": "sub_means", "chunk_size": 9},
        r"chunk_size=9 must be a multiple of (?P<chunk_size>\d)",
        {},
    ),
    (
        kp.select_chunk,
        SELECT | {"selection": "shortlist", "table": "sub_means", "chunk_size": 9},
        "or choose table='(?P<table>\\w+)'",
        {},
    ),
    (kp.select_chunk, SELECT | {"selection": "exat"}, MEANT.replace("to", "selection"), {}),
    (
        kp.top1_chunk_decode,
        DECODE | {"selection": "approx", "chunk_mean_BcGK": (2, 3, 2, 8)},
        r"chunk_mean must be \[2, at least (?P<n>4), 2, 8\]",
        {"chunk_mean_BcGK": (2, 4, 2, 8)},
    ),
    (kp.top1_chunk_decode, DECODE | {"q_BHK": (1, 4, 8)}, "k cache must share batch .* with q", {"q_BHK": (2, 4, 8)}),
    (kp.short_conv, CONV | {"w_EW": (7, 4)}, r"w_EW must be \(8, 4\)", {"w_EW": (8, 4)}),
    (kp.short_conv, CONV | {"scale": 0.5}, "set l2_heads", {"l2_heads": 2}),
    (kp.short_conv, CONV | {"scale": 0.5}, "or scale the outputs", {"scale": 1.0}),
    (
        kp.token_shift,
        {"x_BTD": (2, 4, 8), "last_BD": (2, 7), "mus": [(8,)]},
        r"last_BD must be \(2, 8\)",
        {"last_BD": (2, 8)},
    ),
    (kp.token_shift, {"x_BTD": (2, 4, 8), "last_BD": None, "mus": []}, r"pass one array \[D\]", {"mus": [(8,)]}),
    (kp.head_norm, NORM | {"eps": 0.0}, "eps must be above 0", {"eps": 1e-6}),
    *(
        (
            kp.linear_attention,
            RKV | {"chunk_size": 2, "u_HK": (2, 4), "low_rank": [(1, 4, 2, 4), (1, 4, 2, 4)]},
            "give one of the two",
            {drop: None},
        )
        for drop in ("u_HK", "low_rank")
    ),
    (kp.mamba3_operands, OF_MAMBA3 | {"b_bias_HN": (3, 8)}, r"b_bias_HN must be \(2, 8\)", {"b_bias_HN": (2, 8)}),
    (
        kp.mamba3_operands,
        OF_MAMBA3 | {"turn_BTR": (1, 4, 5), "start_BHR": (1, 2, 5)},
        r"have at most (?P<n>\d)",
        {"turn_BTR": (1, 4, 4), "start_BHR": (1, 2, 4)},
    ),
    (kp.wkv7_operands, OF_7 | {"k_k_D": (7,)}, r"k_k_D must be \(8,\)", {"k_k_D": (8,)}),
    (
        straight_through,
        {"hard": (3,), "soft": (4,)},
        r"same shape, not \(3,\) and \(4,\)",
        {"soft": (3,)},
    ),
]


def _arrays_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: _arrays(value) for key, value in arguments.items()}


def _arrays(value: Any) -> Any:
    if isinstance(value, list):
        return kp.LowRank(*match) if len(match := tuple(map(_arrays, value))) == 3 else match
    return jnp.zeros(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("op", "wrong", "advice", "right"), KERNELS)
def test_an_argument_as_the_error_advises(
    op: Callable[..., Any], wrong: dict[str, Any], advice: str, right: dict[str, Any]
):
    def shapes(arguments: dict[str, Any]) -> Any:
        bare = inspect.unwrap(op)  # without the tests' checks of shapes, which come first
        return jax.eval_shape(lambda: bare(**_arrays_of(arguments)))

    with pytest.raises(ValueError, match=advice) as error:
        shapes(wrong)
    match = re.search(advice, str(error.value))
    assert match
    words = {key: int(text) if text.isdecimal() else text for key, text in match.groupdict().items() if key in wrong}
    assert words or right
    shapes(wrong | words | right)


def test_a_backend_as_the_error_advises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "_outside", {})
    new = kp.Backend("xla", lambda: None)
    with pytest.raises(ValueError, match="another name"):
        outside.register_backend("short_conv", new)
    outside.register_backend("short_conv", kp.Backend("mine", new.load, lambda problem: "never"))


def test_a_config_without_a_backend_as_the_error_advises():
    def attend(implementation: str | None) -> None:
        with explained():
            jax.eval_shape(lambda: kp.causal_attention(**_arrays_of(QKV), implementation=implementation))

    with pytest.raises(UserError, match=r"config\.model\.mixer\.implementation; None takes"):
        attend("triton")
    attend(None)
    _config("transformer_pp", {"mixer.implementation": "None"})


# -------------------------------------------------------------------------------------- the files of a mixer and config
MIXER = """
from seqjax import mixers
from seqjax.mixers.base import Mixer, RecurrentMixer
{above}
class {cls}({parent}):
    def __init__(self, {arguments}):
        pass
    def init_cache(self, batch, max_len, dtype):
        return ()
    def step(self, x_BD, cache):
        return x_BD, cache
"""
CONFIG = """
from seqjax import presets
def get_config(arg=""):
    return presets.get_config(arg, name="mine", mixer={mixer})
"""


def _mixer(
    cls: str = "Own", *, parent: str = "RecurrentMixer", above: str = "", arguments: str = "dim, *, rngs"
) -> str:
    return MIXER.format(cls=cls, parent=parent, above=above, arguments=arguments)


def _own(mixer: str = '{"name": "own"}') -> str:
    return CONFIG.format(mixer=mixer)


OWN_2 = _mixer("Own", above='@mixers.register("own")').replace("dim, *,", "dim, *, width=3,")
# Files, the config (a name of a mixer if it has no colon), the advice, and the files and config that follow it.
Files = dict[str, str]
CODE: dict[str, tuple[Files, str, str, Files, str]] = {
    "a name in two files": (
        {"own.py": _mixer(), "at/own.py": _mixer() + "#", "at/mine.py": _own()},
        "at/mine.py:debug",
        r"(?P<path>\S+) and \S+\. Write the path of the file",
        {},
        "at/mine.py:debug,model.mixer.name={path}:Own",
    ),
    "a name in two files, of a shipped config": (
        {"own.py": _mixer(), "at/own.py": _mixer() + "#", "at/mine.py": _own()},
        "at/mine.py:debug",
        r"(?P<path>\S+) and \S+\. Write the path of the file",
        {},
        "{path}:Own",
    ),
    "two files that register one name, renamed": (
        {"own.py": OWN_2, "at/own.py": OWN_2 + "#", "at/mine.py": _own('{"name": "at/own.py:Own"}')},
        "at/mine.py:debug",
        r"in two files .* Rename one of them and its mixer",
        {"at/own_2.py": OWN_2.replace('"own"', '"own_2"'), "at/mine.py": _own('{"name": "own_2"}')},
        "at/mine.py:debug",
    ),
    "a config file named like a shipped mixer": (
        {"gla.py": _mixer() + _own('{"name": "gla"}')},
        "gla.py:debug",
        "Rename the file and its mixer",
        {"own.py": _mixer() + _own()},
        "own.py:debug",
    ),
    "a file without a class": ({"own.py": _mixer()}, "./own.py", r"write FILE\.py:CLASS", {}, "./own.py:Own"),
    "a class that is not there": ({"own.py": _mixer()}, "own.py:Onw", MEANT, {}, "own.py:{to}"),
    "a mixer that is not there": ({}, "top1_chnk", MEANT, {}, "{to}"),
    "not a module": ({"here_1/own.py": _mixer()}, "here_1..own", r"write package\.module", {}, "here_1.own"),
    "not a module, a file": ({"own.py": _mixer()}, "here..own", r"or FILE\.py:CLASS", {}, "own.py:Own"),
    "no such module": (
        {},
        "here_2.own",
        "no module 'here_2' to import.* in the module's directory",
        {"here_2/own.py": _mixer()},
        "here_2.own",
    ),
    "two classes, one selected": (
        {"own.py": _mixer() + _mixer("Other")},
        "own",
        r"Select one of several as FILE\.py:CLASS",
        {},
        "own.py:Other",
    ),
    "two classes, one of them a base class": (
        {"own.py": _mixer() + _mixer("Other")},
        "own",
        "begin the names of base classes with an underscore",
        {"own.py": _mixer("_Own") + _mixer("Other")},
        "own",
    ),
    "no mixer's class": (
        {"own.py": _mixer(parent="object")},
        "own.py:Own",
        r"must derive from seqjax\.mixers\.base\.(?P<parent>Mixer)",
        {"own.py": _mixer(parent="Mixer").replace("def init", "__call__ = lambda self, x: x\n    def init")},
        "own.py:Own",
    ),
    "a constructor without rngs": (
        {"own.py": _mixer(arguments="dim")},
        "own",
        r"def __init__\(self, (?P<arguments>dim, \*, SETTINGS, rngs)\)",
        {"own.py": _mixer(arguments="dim, *, rngs")},
        "own",
    ),
    "a class without its methods": (
        {"own.py": _mixer(parent="Mixer")},
        "own",
        r"must define (?P<method>__call__)",
        {"own.py": _mixer(parent="Mixer").replace("def init", "__call__ = lambda self, x: x\n    def init")},
        "own",
    ),
    "a recurrent class without step": (
        {"own.py": _mixer().replace("step", "stop")},
        "own",
        r"define (?P<method>step) or prefill",
        {"own.py": _mixer()},
        "own",
    ),
    "a setting without a default": (
        {"own.py": _mixer(arguments="dim, *, width: int, rngs"), "mine.py": _own()},
        "mine.py:debug",
        r"config\.model\.mixer\.(?P<key>width) is missing.* set it",
        {"mine.py": _own('{"name": "own", "width": 3}')},
        "mine.py:debug",
    ),
    "an error in the file": (
        {"own.py": _mixer() + "1 / 0\n"},
        "own",
        r"own\.py, line 12: ZeroDivisionError.* Correct the file",
        {"own.py": _mixer()},
        "own",
    ),
    "no Python": (
        {"own.py": _mixer() + "def\n"},
        "own",
        r"own\.py, line 12: .* Correct the file",
        {"own.py": _mixer()},
        "own",
    ),
    "a config of another kind": (
        {"mine.py": "def get_config(arg=''):\n    return 3\n"},
        "mine.py:debug",
        "must return a (?P<kind>ConfigDict) or a dict",
        {"mine.py": _own('{"name": "gla"}')},
        "mine.py:debug",
    ),
    "no mixer": ({"mine.py": _own("{}")}, "mine.py:debug", r"Known: .*(?P<name>fox)", {}, "fox"),
    "mixers without one": (
        {"mine.py": _own("()")},
        "mine.py:debug",
        r"name at least one mixer\. Known: .*(?P<name>fox)",
        {},
        "fox",
    ),
    "a mixer as a number": ({}, "gla:debug,model.mixer=3", r"mixer\.name must .* (?P<name>fox)", {}, "fox"),
    "a group as a number": (
        {"mine.py": _own('{"name": "gla"}').replace('"mine",', '"mine", settings={"optim": 3},')},
        "mine.py:debug",
        r"config\.(?P<group>optim) must be a group",
        {"mine.py": _own('{"name": "gla"}').replace('"mine",', '"mine", settings={"optim": {"lr": 1.0}},')},
        "mine.py:debug",
    ),
}


@pytest.fixture()
def registry(monkeypatch: pytest.MonkeyPatch):
    """Provide an empty registry."""
    monkeypatch.setattr(_registry, "_registered", {})
    monkeypatch.setattr(_registry, "_by_file", set())
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("name", CODE)
@pytest.mark.usefixtures("registry")
def test_code_as_the_error_advises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    def read(config: str) -> None:
        importlib.invalidate_caches()
        is_mixer = "debug" not in config
        own = [("model.mixer.name", config)] if is_mixer else []
        from_config_dict(presets.read_config("transformer_pp:debug" if is_mixer else config, own))

    files, config, advice, more, then = CODE[name]
    monkeypatch.chdir(tmp_path)
    for path, text in files.items():
        write(tmp_path / path, text)
    if "register" in "".join(files.values()):
        mixers.load(mixers.locate("own.py:Own"))
    with pytest.raises(UserError) as error:
        read(config)
    match = re.search(advice, str(error.value))
    assert match, error
    for path, text in more.items():
        write(tmp_path / path, text)
    read(then.format(**match.groupdict()))


@pytest.mark.usefixtures("registry")
def test_a_class_as_the_error_advises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def own() -> Any:
        return type("Own", (base.RecurrentMixer,), {"step": lambda self, x, cache: (x, cache), "__init__": constructor})

    def constructor(self: Any, dim: int, *, rngs: Any) -> None:
        del self, dim, rngs

    class Wide(base.RecurrentMixer):
        def __init__(self, dim: int, *, width: int, rngs: nnx.Rngs):
            self.width = width

        def init_cache(self, batch: int, max_len: int, dtype: Any) -> Any:
            return ()

        def step(self, x_BD: Any, cache: Any) -> Any:
            return x_BD, cache

    wide: Any = Wide
    with pytest.raises(UserError, match=r"width is missing.* set it"):
        wide(8, rngs=nnx.Rngs(0))
    assert wide(8, width=3, rngs=nnx.Rngs(0)).width == 3
    with pytest.raises(UserError, match="another name"):
        mixers.register("gla")
    with pytest.raises(UserError, match=r"register\('(?P<name>\w+)'\)") as error:
        mixers.name_of(own())
    match = re.search(r"register\('(\w+)'\)", str(error.value))
    assert match
    cls = type("Own", (own(),), {"init_cache": lambda self, batch, max_len, dtype: ()})
    assert mixers.name_of(mixers.register(match[1])(cls)) == match[1]


def test_a_rule_as_the_error_advises(monkeypatch: pytest.MonkeyPatch):
    mesh = sharding.make_mesh()
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    monkeypatch.setattr(sharding, "RULES", {**sharding.RULES})
    with pytest.raises(UserError, match=r"sharding\.add_rule\('width', mesh_axis\)"):
        sharding.shardings(mesh, {"w": shape}, {"w": ("width",)})
    with pytest.raises(UserError, match="choose 'fsdp'"):
        sharding.add_rule("width", "data")
    sharding.add_rule("width", "fsdp")
    with pytest.raises(UserError, match="another name"):
        sharding.add_rule("width", "tensor")
    sharding.add_rule("breadth", "tensor")
    sharding.shardings(mesh, {"w": shape, "b": shape}, {"w": ("width",), "b": ("breadth",)})


def test_a_config_from_python_as_the_error_advises():
    with pytest.raises(TypeError, match="needs `mixer` or `base`"):
        presets.get_config("debug", name="mine")
    from_config_dict(presets.get_config("debug", name="mine", mixer={"name": "gla"}))
    from_config_dict(presets.get_config("debug", name="mine", base="gla"))
