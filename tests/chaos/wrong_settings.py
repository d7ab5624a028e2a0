"""Invalid command lines, and odd ones that may be valid, for `tests.chaos.attacks`."""

import dataclasses
import math
import random
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seqjax.commands.cli import COMMANDS
from seqjax.config import Config
from seqjax.fields import Bounds, hints_of, optional, plain
from tests.chaos.scenes import NIAH, Scenes

WRONG: dict[type, list[str]] = {
    int: ["abc", "1.5", "nan", "[1]", "{}", "1e400", str(-(2**70)), "'1'", "1,2"],
    float: ["abc", "nan", "[1]", "inf", "-inf", "'0.1'", "1e400"],
    bool: ["2", "maybe", "None", "1.0", "[]"],
    tuple: ["5", "abc", "{}", "(1, (2,))", "None"],
}


def wrong_settings() -> dict[str, list[str]]:
    """Return invalid values of each setting, from its type and bounds, by full key."""
    return dict(_wrong_of(Config, ""))


def _wrong_of(cls: Any, prefix: str) -> Iterator[tuple[str, list[str]]]:
    for name, hint in hints_of(cls).items():
        kind, may_be_none = optional(hint)
        if dataclasses.is_dataclass(kind):
            yield from _wrong_of(kind, f"{prefix}{name}.")
            continue
        bounds = [bound for bound in getattr(hint, "__metadata__", ()) if isinstance(bound, Bounds)]
        origin = typing.get_origin(kind)
        wrong: list[str] = []
        if origin is typing.Literal:
            wrong += ["zzz", "1", *([] if may_be_none else ["None"])]
        elif kind in (int, float, bool) or origin is tuple:
            wrong += WRONG[typing.cast(type, origin or kind)]
        for bound in bounds:
            wrong += [f"{bound.low - 1:.0f}"] if plain(kind) is int else [str(bound.low - 0.5)]
            wrong += [f"{bound.high:.0f}"] if bound.high < math.inf else []
        if wrong:
            yield f"{prefix}{name}", wrong


def misspelt(word: str, draw: random.Random) -> str:
    """Return a word with a letter removed, doubled or replaced."""
    at = draw.randrange(len(word) - 1)
    new = draw.choice(
        [word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], word[: at + 1] + "q" + word[at + 1 :]]
    )
    return new if new != word else f"{word}q"


# Settings that conflict with each other, the data or the machine (one device).
CONFLICTS = [
    ("train.batch_size=6", "train.accumulate=4"), ("mesh.fsdp=2",), ("mesh.data=3",), ("mesh.tensor=0",),
    ("mesh.data=-2",), ("mesh.seq=5",), ("model.mixer.heads=3",), ("model.mixer.heads=0",), ("model.mixer.kv_heads=3",),
    ("model.mixer.window=0",), ("model.mixer.window=-1",), ("model.mixer.position=none2",), ("model.mixer.zzz=1",),
    ("model.mixer=5",), ("model.mixer.name=zzz",), ("model.mixer.name=",), ("model.mixer={}",),
    ("checkpoint.keep_period=3",), ("checkpoint.every=0", "checkpoint.keep_period=3"), ("train.ends=(0.5,)",),
    ("train.ends=(0.9,0.5,1.0)",), ("train.ends=(0.0,1.0)",), ("train.ends=(1.0,1.0)",), ("train.ends=(nan,1.0)",),
    ("train.ends=(0.001,1.0)",), ("train.ends=(0.5,2.0)",), ("train.ends=(1.0,)", "optim.cooldown=0"),
    ("data.corpus=blocks", "data.path="), ("data.corpus=stream", "data.path="), ("data.corpus=tfds",),
    ("data.tfds=('zzz',)",), ("data.corpus=stream",), ("data.path=/nowhere",), ("data.path=/dev/null",),
    ("data.train_domains=('zzz',)",), ("data.eval_domains=('zzz',)",), ("data.weights=(0.5,)",),
    ("data.weights=(0.0,0.0)",), ("data.weights=(-1.0,2.0)",), ("data.weights=(nan,1.0)",), ("data.tokenizer=mixtral",),
    ("data.tokenizer=huggingface",), ("data.tokenizer=huggingface", "data.tokenizer_path=/nowhere"),
    ("eval.path=('/nowhere',)",), ("eval.path=('{held}','{held}')",), ("eval.path=('{blocks}/train',)",),
    ("model.vocab_size=257",), ("train.seq_len=31",), ("train.seq_len=64",), ("optim.clip_norm=0",),
    ("data.cache_dir=/dev/null/x", "data.corpus=builtin", "data.path="), ("train.steps=2147483648",), ("zzz=1",),
    ("train=5",), ("train.zzz=1",), ("train.steps.zzz=1",), ("train.steps[0]=1",), ("model.mlp=None",), ("log={}",),
    ("size=",), ("size=/dev/null",), ("size=../../x",), ("name=",), ("name=/dev/null",), ("name=../../x",),
    ("name=a\x01b",), ("model.norm_eps=2",), ("model.init=None",), ("model.mlp.kind=relu",),
    ("model.mixer.implementation=zzz",), ("model.mixer.implementation=triton",), ("optim.lr=-1",), ("log.wandb=5",),
]  # fmt: skip
# Odd settings. They may be rejected; otherwise the run must be complete.
ODD = [
    ("model.dim=2", "model.mixer.heads=1"), ("model.dim=7", "model.mixer.heads=1"),
    ("model.dim=6", "model.mixer.heads=3"),
    ("model.n_layers=1",), ("model.n_layers=7",), ("model.vocab_size=258",), ("model.vocab_size=1001",),
    ("train.batch_size=1",), ("train.batch_size=3",), ("train.batch_size=7", "train.per_device_batch_size=2"),
    ("train.per_device_batch_size=1000",), ("train.accumulate=8",), ("train.steps=1",), ("optim.warmup_steps=1000",),
    ("optim.lr=0",), ("optim.b1=0", "optim.b2=0"), ("optim.eps=0",), ("optim.final_lr=1",), ("eval.tokens=1",),
    ("eval.tokens=100000000",), ("eval.every=1",), ("eval.every=1000000000000",), ("eval.batch_size=1",),
    ("eval.batch_size=1000",), ("checkpoint.every=1", "checkpoint.keep=1"), ("checkpoint.every=1000000",),
    ("log.every=1000",), ("log.profile_start=1", "log.profile_steps=1000"), ("log.profile_start=99",),
    ("log.sample_tokens=1000",), ("model.mlp.dim=1",), ("model.mlp.kind=none",), ("model.loss_chunk=1",),
    ("model.loss_chunk=1000000",), ("model.mixer.window=1",), ("model.mixer.window=100000",), ("model.norm=layernorm",),
    ("model.mixer.name=mamba2",), ("model.mixer.name=rwkv7",), ("model.mixer.name=top1_element",),
    ("train.ends=(1.0,)",),
    ("train.ends=(0.5,1.0)", "checkpoint.ends=none"), ("model.learned_positions=True",), ("model.remat=full",),
    ("data.workers=1",), ("data.weights=(3,1)",), ("data.regime=mixed",), ("data.train_domains=('github',)",),
    ("data.eval_domains=('book',)",), ("train.seed=4294967295",), ("name=Ünïcödé",), ("size=[]",),
    ("model.dtype=bfloat16",),
]  # fmt: skip

# Other commands: valid arguments, and option values that must be rejected. {x} is a path from `Scenes`.
WORKING: dict[str, list[str]] = {
    "evaluate": ["--workdir={root}/finished"],
    "generate": ["--workdir={root}/finished", "--max_new_tokens=2"],
    "prepare": ["--source={root}/text", "--out={place}/out", "--tokenizer=byte", "--seq_len=16", "--workers=1"],
    "study": ["--study={root}/study.py", "--out={place}/out", "--partial"],
    "judge": ["--config=mamba2:debug", "--out={place}/out", "--references={place}/references", "--dry_run"],
    "recall": ["--size=demo", "--out={place}/out", "--report"],
    "niah": ["--workdir={root}/finished", *NIAH],
    "convert": ["export", "--workdir={root}/finished", "--out={place}/out", "--weights_only"],
    "harness": ["--workdir={root}/finished", "--tasks=zzz"],
}
NUMBERS = ["abc", "", "1.5", "nan", "-1", "[1]", "1e400"]
WRONG_OPTIONS: dict[str, dict[str, list[str]]] = {
    "evaluate": {
        "workdir": ["/nowhere", "", "/dev/null", "{root}/blocks", "{root}", "zzz://a/b", "gs://"],
        "tokens": NUMBERS, "data": ["/nowhere", "/dev/null", "{root}/text", "{root}/finished", "{held},{held}"],
        "allow-code": ["zzz", ""],
    },
    "generate": {
        "workdir": ["/nowhere", "", "/dev/null", "{root}/public"],
        "max_new_tokens": [*NUMBERS, "0", "1000000000000"], "temperature": ["abc", "", "nan", "-1", "inf", "1e400"],
        "top_k": [*NUMBERS, "1000000"], "top_p": ["abc", "", "nan", "-1", "0", "2", "inf"],
        "seed": [*NUMBERS, "4294967296"], "stop": [""],
        "prompts": ["/nowhere", "/dev/null", "{root}", "{root}/study.npz"],
        "prompt": ["a\udcff"], "prefill_chunk": NUMBERS,
    },
    "prepare": {
        "source": ["/nowhere", "", "/dev/null", "{root}/blocks", "{root}/finished", "zzz://a/b"],
        "out": ["/dev/null", "/dev/null/x", "{root}/finished", "{root}/blocks", "gs://b/x"],
        "tokenizer": ["zzz", "", "/nowhere.model", "/dev/null", "huggingface", "{root}/study.py", "{root}/x.json"],
        "tokenizer_path": ["/nowhere"], "seq_len": [*NUMBERS, "0", "100000000"], "workers": NUMBERS,
        "executor": ["zzz", "dask:", "dask:zzz"], "text_field": ["zzz"], "domain_field": ["zzz"],
        "domain_from": ["zzz"], "domains": ["zzz"], "validation": ["abc", "nan", "-1", "2", "inf", "1.0"],
        "min_tokens": [*NUMBERS, "1000000"], "max_tokens": NUMBERS,
    },
    "study": {
        "study": ["zzz", "/nowhere.py", "/dev/null", "{root}/finished", "{root}/results/points.csv", ""],
        "configs": ["mamba2", "mamba2,mamba2", "zzz,mamba2"], "seeds": ["abc", "1.5"], "jobs": [*NUMBERS, "0"],
        "only": ["zzz", "99", "-1"], "analyse": ["/nowhere", "/dev/null", "{root}/blocks", "{root}"],
        "out": ["/dev/null", "/dev/null/x", "gs://b/x"],
    },
    "judge": {
        "config": ["zzz", "/nowhere.py", "mamba2:zzz", "mamba2:debug,zzz=1", "", "/dev/null", "{root}/study.py"],
        "jobs": [*NUMBERS, "0"], "seeds": [*NUMBERS, "0"],
        "rates": ["abc", "nan", "-1", "0", "inf", "1e-3,1e-3", "1e400"],
        "match": ["all", ""], "runs": ["/nowhere", "/dev/null", "{root}/blocks", "{root}/results", "gs://b/x"],
        "references": ["gs://b/x"], "out": ["gs://b/x"],
    },
    "recall": {
        "size": ["zzz", ""], "models": ["zzz", "Mamba-2,zzz"], "tasks": ["zzz", "s5,zzz"],
        "seeds": [*NUMBERS, "0"], "jobs": [*NUMBERS, "0"], "minutes": ["abc", "nan", "-1"],
        "out": ["/dev/null", "/dev/null/x"],
    },
    "niah": {
        "workdir": ["/nowhere", "", "/dev/null", "{root}/blocks"], "batch_size": [*NUMBERS, "0"],
        "lengths": ["", "0", "-1", "abc", "1.5", "nan", "1", "10", ","], "samples": [*NUMBERS, "0"],
        "seed": ["abc", "1.5"],
        "prefill_chunk": NUMBERS,
    },
    "convert": {
        "workdir": ["/nowhere", "/dev/null", "{root}/blocks"], "dtype": ["zzz", "float64", "int8", ""],
        "out": ["/dev/null", "/dev/null/x", "{root}/study.py", "{root}/x.bin", "gs://b/x"],
    },
    "harness": {"tasks": ["zzz", ""]},
}  # fmt: skip
IMPORTS = ["/nowhere", "/dev/null", "{root}/blocks", "{root}/finished", "{root}/study.py", "hf://", ""]


def draw_command(scenes: Scenes, folder: Path, draw: random.Random) -> tuple[str, list[str], tuple[str, ...], bool]:
    """Return a command, its arguments, words of which an error must contain one, and whether it must fail."""
    if draw.random() < 0.5:
        return _of_run(scenes, folder, draw)
    command = draw.choice(sorted(WORKING))
    paths = {"root": str(scenes.root), "place": str(folder), "held": str(scenes.test_set), "blocks": str(scenes.blocks)}
    argv = [word.format(**paths) for word in WORKING[command]]
    options = WRONG_OPTIONS[command]
    way = draw.choices(["value", "unknown", "word"], [6, 1, 1])[0]
    if way == "value" and command == "convert" and draw.random() < 0.4:
        weights = draw.choice(IMPORTS).format(**paths)
        return (
            command,
            [command, "import", f"--weights={weights}", f"--workdir={folder}/run"],
            ("weights", weights),
            True,
        )
    name = draw.choice([name for name, values in options.items() if values])
    if way == "unknown":
        wrong = misspelt(name, draw)
        return command, [command, *argv, f"--{wrong}=1"], (wrong,), True
    if way == "word":
        word = draw.choice(["zzz", "-x", "--", "---", "--=", "=", "-", "--config.zzz=1", "--help2", "\udcff"])
        return command, [command, *argv, word], (word.lstrip("-") or "rgument", "rgument"), True
    value = draw.choice(options[name]).format(**paths)
    rest = [word for word in argv if not word.startswith(f"--{name}=")]
    if command == "study" and name in ("analyse", "configs"):
        rest = [word for word in rest if name == "configs" and word.startswith("--out")]
    if command == "study" and name in ("seeds", "jobs", "only"):
        rest = [word for word in rest if word != "--partial"]
    words = (name, name.rstrip("s"), *([value, value.rpartition(",")[2]] if value else []))
    return command, [command, *rest, f"--{name}={value}"], words, True


def _of_run(scenes: Scenes, folder: Path, draw: random.Random) -> tuple[str, list[str], tuple[str, ...], bool]:
    argv = scenes.train(folder / "run", train__steps=2, eval__every=0, eval__path="()")
    way = draw.choices(["wrong", "conflict", "odd", "name", "command"], [5, 4, 4, 2, 1])[0]
    paths = {"held": str(scenes.test_set), "blocks": str(scenes.blocks)}
    settings = wrong_settings()
    if way == "command":
        wrong = misspelt(draw.choice(sorted(COMMANDS)), draw)
        return "train", [wrong, *argv[1:]], (wrong,), True
    if way == "name":
        *groups, last = draw.choice(sorted(settings)).split(".")
        key = (
            ".".join([*groups, misspelt(last, draw)])
            if draw.random() < 0.7 or not groups
            else misspelt(groups[0], draw) + f".{last}"
        )
        return "train", [*argv, f"--config.{key}=1"], (key.rpartition(".")[2], key.partition(".")[0]), True
    if way == "wrong":
        key = draw.choice(sorted(settings))
        value = draw.choice(settings[key])
        return "train", [*argv, f"--config.{key}={value}"], (key, key.rpartition(".")[2]), True
    chosen = [
        text.format(**paths) if "'{" in text else text for text in draw.choice(ODD if way == "odd" else CONFLICTS)
    ]
    pairs = [text.partition("=")[::2] for text in chosen]
    words = [word for key, value in pairs for word in (key, key.rpartition(".")[2], *filter(None, [value]))]
    words += ["config.model.mixer."] * any(
        key == "model.mixer.name" for key, _ in pairs
    )  # the new mixer's defaults may not fit
    words += [str(scenes.blocks)] * ("data.corpus=stream" in chosen)  # the directory has no text
    return "train", [*argv, *(f"--config.{text}" for text in chosen)], tuple(words), way == "conflict"
