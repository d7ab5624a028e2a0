"""Sizes, regimes and named configs, for config files that run from any directory.

    from seqjax import presets

    def get_config(arg=""):
        return presets.get_config(arg, name="mine", mixer={"name": "transformer_pp", "window": 256})

`arg` is the text after the file's name on the command line, `SIZE[,REGIME][,key=value ...]`:

    demo      (default) minutes on two CPU cores: byte tokenizer, built-in corpus
    debug     seconds
    110m      arXiv 2505.18522, Appendix A: small, T = 2,048, batch 256
    1b3       large, T = 2,048, batch 128
    135m_100k small, untied, T = 102,400 (the paper says "100k"), batch 8

From the paper: Adam (0.9, 0.95), linear warmup and linear decay, vocabulary 32,000, RoPE base 1e4 at 2k and 1e6 at
100k. Not given in the paper: eps 1e-8, no weight decay, clip 1.0, final learning rate 0, 100B tokens.
"""

import contextlib
import dataclasses
import inspect
import re
import shlex
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from seqjax import mixers, store, user_code
from seqjax.config.parse import assign, complete, is_list, parts, read
from seqjax.config.settings import Config, DataConfig
from seqjax.errors import UserError, nearest
from seqjax.fields import hints_of, is_group
from seqjax.files import find_in_current_directory

REGIMES: tuple[str, ...] = typing.get_args(hints_of(DataConfig)["regime"])
PAPER_TOKENS = 100_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A scale of model, data and run.

    `heads` and `rope_base` are defaults for mixers with these settings.
    """

    dim: int
    n_layers: int
    heads: int
    mlp_dim: int | None = None
    chunk_size: int = 128  # Top-1 chunk length
    rope_base: float = 1e4
    tie_embeddings: bool = True
    remat: str = "none"
    scan_layers: bool = True
    seq_len: int
    batch_size: int
    per_device_batch_size: int | None = None
    steps: int
    lr: float
    warmup_steps: int
    eval_every: int = 500_000_000
    eval_tokens: int = 4_194_304
    entropy_tokens: int = 1_048_576  # for configs that study the entropy of attention
    checkpoint_every: int = 1000
    builtin: bool = False  # built-in corpus in bytes instead of prepared blocks


SIZES = {
    "demo": Size(
        dim=128, n_layers=4, heads=4, seq_len=512, batch_size=8, lr=2e-3, warmup_steps=30, steps=300, chunk_size=64,
        eval_every=410_000, eval_tokens=32_768, entropy_tokens=32_768, checkpoint_every=100, builtin=True,
    ),
    "debug": Size(
        dim=64, n_layers=2, heads=2, seq_len=128, batch_size=4, lr=2e-3, warmup_steps=5, steps=20, chunk_size=16,
        eval_every=5_000, eval_tokens=2_048, entropy_tokens=2_048, checkpoint_every=10, builtin=True,
    ),
    "110m": Size(
        dim=768, n_layers=12, heads=12, mlp_dim=2048, seq_len=2048, batch_size=256, lr=2e-4, warmup_steps=2500,
        steps=PAPER_TOKENS // (256 * 2048), per_device_batch_size=16, scan_layers=False,
    ),
    "1b3": Size(
        dim=2048, n_layers=24, heads=16, mlp_dim=5504, seq_len=2048, batch_size=128, lr=5e-5, warmup_steps=5000,
        steps=PAPER_TOKENS // (128 * 2048), per_device_batch_size=8, remat="attention",
    ),
    "135m_100k": Size(
        dim=768, n_layers=12, heads=12, mlp_dim=2048, seq_len=102_400, batch_size=8, lr=2e-4, warmup_steps=2500,
        steps=PAPER_TOKENS // (8 * 102_400), per_device_batch_size=1, remat="attention", rope_base=1e6,
        tie_embeddings=False, scan_layers=False,
    ),
}  # fmt: skip

Mixers = Mapping[str, Any] | tuple[Mapping[str, Any], ...]
Settings = Mapping[str, Any] | Callable[[Size], Mapping[str, Any]]


# -------------------------------------------------------------------------------------------------- a config's content
def get_config(
    arg: str, *, name: str, mixer: Mixers | None = None, base: str | None = None, settings: Settings | None = None
) -> ConfigDict:
    """Return all settings of a pre-norm RMSNorm + GeGLU model around `mixer`.

    Args:
        arg: `SIZE[,REGIME][,key=value ...]`; its settings take precedence over all others.
        name: Name of the config.
        mixer: Its name and the settings that differ from its defaults, or a tuple of such groups, repeated over the
            layers.
        base: Name of another config, from which this one differs by `mixer` (if given) and `settings`.
        settings: Dotted keys and values that differ, or a function that returns them for a size.

    Raises `UserError` for an unknown size, key or mixer.
    """
    size_name, regime, overrides = split(arg)
    size = SIZES[size_name]
    named = [(key, text) for key, text in overrides if _selects_mixer(key)]
    if base is not None:
        base_arg = ",".join([size_name, regime, *(f"{key}={text}" for key, text in named if mixer is None)])
        values = load(base).get_config(base_arg).to_dict()
    elif mixer is not None:
        values = _values(size)
    else:
        raise TypeError("get_config needs `mixer` or `base`")
    values |= {"name": name, "size": size_name}
    if mixer is not None:
        for key, text in named:
            mixer = _with_mixer_override(mixer, key, text)
        values["model"]["mixer"] = _with_size_defaults(mixer, size)
    values["data"]["regime"] = regime
    config = ConfigDict(complete(Config, values))
    changes = settings(size) if callable(settings) else settings or {}
    for key, value in changes.items():
        if not (named and key.startswith("model.mixer")):  # belongs to a mixer that `arg` has replaced
            override(config, key, value)
    for key, text in overrides:
        if not _selects_mixer(key):
            override(config, key, text)
    return config


def pick(table: Mapping[str, Any], name: str, *, kind: str) -> Any:
    """Return an entry of a config's or study's table.

    Raises `UserError`, listing all names, for an unknown name.
    """
    if name not in table:
        raise UserError(f"{name!r} is no {kind}.{nearest(name, table)}")
    return table[name]


def override(config: ConfigDict, key: str, value: Any) -> None:
    """Set a dotted key, such as `model.mixer.window`, of a complete config.

    Text is converted to the setting's type.
    """
    assign(Config, config, key, value)


def _values(size: Size) -> dict[str, Any]:
    """Return the settings that depend on the size.

    All other settings have their dataclass defaults.
    """
    data = {"corpus": "blocks", "tokenizer": "mixtral", "path": f"data/slimpajama-{size.seq_len}"}
    return {
        "model": {
            # 256 bytes, BOS and EOS, rounded up to a multiple of 8
            "vocab_size": 264 if size.builtin else 32_000,
            "dim": size.dim,
            "n_layers": size.n_layers,
            "mlp": {"dim": size.mlp_dim},
            "tie_embeddings": size.tie_embeddings,
            "remat": size.remat,
            "scan_layers": size.scan_layers,
        },
        "data": {"corpus": "auto", "tokenizer": "byte"} if size.builtin else data,
        "train": {
            "steps": size.steps, "batch_size": size.batch_size, "seq_len": size.seq_len,
            "per_device_batch_size": size.per_device_batch_size,
        },
        "optim": {"lr": size.lr, "warmup_steps": size.warmup_steps},
        "eval": {"every": size.eval_every, "tokens": size.eval_tokens},
        "checkpoint": {"every": size.checkpoint_every},
    }  # fmt: skip


def _with_size_defaults(mixer: Any, size: Size) -> Any:
    """Return a mixer's group with the size's `heads` and `rope_base`.

    They are added if the mixer has these settings and they are unset.
    """
    if isinstance(mixer, tuple):
        return tuple(_with_size_defaults(m, size) for m in mixer)
    if not is_group(mixer) or not isinstance(mixer.get("name"), str):
        return mixer  # The check of the config reports the error.
    # The group keeps the name: `read_config` locates it again, and a label lacks the directory that the user named.
    known = hints_of(mixers.settings_class(mixers.locate(mixer["name"])))
    return {key: getattr(size, key) for key in ("heads", "rope_base") if key in known} | dict(mixer)


def _selects_mixer(key: str) -> bool:
    """Return whether a key selects a mixer, and so the available settings.

    Such keys are applied first.
    """
    return re.fullmatch(r"model\.mixer(\[\d+\])?(\.name)?", key) is not None


def _with_mixer_override(mixer: Any, key: str, text: str) -> Any:
    """Return the mixers after overriding a key that selects a mixer.

    The keys are `model.mixer`, `model.mixer.name` and `model.mixer[i].name`. A new mixer starts from its defaults, not
    from the settings of the replaced mixer.
    """
    if key == "model.mixer":
        value = read(Any, text)
        for group in value if isinstance(value, tuple | list) else (value,):
            if not is_group(group) or not isinstance(group.get("name"), str):
                raise UserError(
                    f"{key}={text}: config.model.mixer.name must name a mixer.{nearest('', mixers.known())}"
                )
        return tuple(value) if isinstance(value, list) else value
    is_tuple = isinstance(mixer, tuple)
    holder = ConfigDict({"model": {"mixer": tuple(map(dict, mixer)) if is_tuple else dict(mixer)}})
    override(holder, key, text)
    renamed = holder.to_dict()["model"]["mixer"]
    pairs = zip(renamed, mixer, strict=True) if is_tuple else ((renamed, mixer),)
    new_mixers = tuple(dict(old) if new["name"] == old["name"] else {"name": new["name"]} for new, old in pairs)
    return new_mixers if is_tuple else new_mixers[0]


def _with_named_mixers(values: dict[str, Any], overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a config's values with the mixers that `overrides` name.

    This handles a `get_config` that ignored its argument.
    """
    for key, text in overrides:
        if key != "model.mixer" and _selects_mixer(key):
            mixer = _with_mixer_override(values["model"]["mixer"], key, text)
            size = SIZES.get(str(values.get("size")))
            values["model"]["mixer"] = mixer if size is None else _with_size_defaults(mixer, size)
    return values


def _with_located_mixers(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values with this process's mixer names (`mixers.locate`)."""
    model = values.get("model")
    mixer = model.get("mixer") if isinstance(model, dict) else None
    for group in mixer if isinstance(mixer, list | tuple) else (mixer,):
        if isinstance(group, dict) and isinstance(group.get("name"), str):
            group["name"] = mixers.locate(group["name"])
    return values


def split(arg: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Split `SIZE[,REGIME][,key=value ...]`.

    Raises `UserError` for a word that is neither a size nor a regime.
    """
    size, regime, overrides = "demo", "limited", []
    # A comma inside brackets belongs to the value: data.weights=(0.7,0.3).
    for part in filter(None, (p.strip() for p in parts(arg or ""))):
        key, equals, value = part.partition("=")
        if equals:
            overrides.append((key.strip(), value.strip()))
        elif part in SIZES:
            size = part
        elif part in REGIMES:
            regime = part
        elif overrides and is_list(Config, overrides[-1][0]):
            key, value = overrides[-1]
            quoted = shlex.quote(f"--config=NAME:{arg.replace(f'{value},{part}', f'({value},{part})')}")
            raise UserError(
                f"--config=NAME:{arg}: {part!r} is no size or regime. If it belongs to {key}, a list inside --config "
                f"needs parentheses, and these need quotes: {quoted}, or --config.{key}={value},{part} apart from it."
            )
        else:
            raise UserError(f"--config=NAME:{arg}: {part!r} is no size or regime.{nearest(part, [*SIZES, *REGIMES])}")
    return size, regime, overrides


# ------------------------------------------------------------------------------------------------- config files by name
def directories() -> list[Path]:
    """Return the directories with shipped configs.

    They are inside an installed seqjax, or next to the package in a checkout.
    """
    package = Path(__file__).parent.parent
    checkout = package.parent
    # A `configs` directory next to an installed package belongs to another package.
    checkout_configs = [checkout / "configs"] if (checkout / "pyproject.toml").is_file() else []
    return [d for d in (package / "configs", *checkout_configs) if d.is_dir()]


def names(folder: str = "") -> list[str]:
    """Return the shipped config names: architectures, or a folder's configs.

    Folders are `studies` and `ablations`. Files with a leading underscore are shared code and are left out.
    """
    stems = {p.stem for d in directories() for p in (d / folder).glob("*.py")}
    return sorted(name for name in stems if not name.startswith("_"))


def find(name: str | Path, *, flag: str = "--config", folder: str = "") -> Path:
    """Return a config's file, given a path or a shipped name.

    Shipped names are like `top1_chunk` and `ablations/window`; `configs/top1_chunk.py` is found from any directory.
    `folder` is searched first: with `studies`, a study needs no folder in its name. Raises `UserError`, naming the
    `flag`, if there is no such file.
    """
    path, name = Path(name), str(name)
    if path.suffix == ".py":
        path = store.local(path, flag)
    if path.suffix == ".py" and path.is_file():
        return path
    stem = name.removeprefix("configs/")
    stem = stem.removesuffix(".py") if path.suffix == ".py" else stem.replace(".", "/")
    for directory in directories():
        for parent in (directory / folder, directory):
            shipped = parent / f"{stem}.py"
            if shipped.is_file() and shipped.stem != "__init__":
                return shipped
    kind = flag.lstrip("-")
    hint = "" if folder else " Studies and ablations are in folders: ablations/window."
    if Path(f"{name}.py").is_file():
        hint = f" For the file in this directory write {flag}={name}.py."
    raise UserError(
        f"{flag}: there is no Python file {name} and no {kind} of that name.{nearest(stem, names(folder))}{hint}"
    )


def is_shipped(name: str | Path) -> bool:
    """Return whether a config, given as for `find`, is shipped with seqjax."""
    return _is_shipped(find(name))


def _is_shipped(path: Path) -> bool:
    return any(path.resolve().is_relative_to(directory.resolve()) for directory in directories())


def sets_mlp_dim(flag: str) -> bool:
    """Return whether the config `FILE_OR_NAME[:ARG]` sets `model.mlp.dim`.

    The config is read again with other size widths: a config that follows them does not set it.
    """
    before = dict(SIZES)
    SIZES.update({name: dataclasses.replace(size, mlp_dim=PROBE) for name, size in before.items()})
    try:
        return read_config(flag).to_dict()["model"]["mlp"]["dim"] not in (None, PROBE)
    finally:
        SIZES.update(before)


PROBE = 10_007  # a width that no config uses


def load(name: str | Path) -> ModuleType:
    """Return the module in the config file from `find`."""
    return load_file(find(name))


def load_file(path: str | Path) -> ModuleType:
    """Return the module of the config or study file at `path`.

    It need not be importable by name.
    """
    path = Path(path)
    if not _is_shipped(path):
        find_in_current_directory()
    return user_code.run(user_code.read(path), f"seqjax_config_{path.stem}")


def read_config(flag: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Return the config `FILE_OR_NAME[:ARG]` after the overrides (dotted key, text)."""
    name, colon, arg = flag.partition(":")
    module = load(name)
    if not hasattr(module, "get_config"):
        raise UserError(f"--config: {module.__file__} has no get_config(arg), so it is not a config.")
    named = [f"{key}={text}" for key, text in overrides if _selects_mixer(key)]
    parameters = inspect.signature(module.get_config).parameters.values()
    takes_arg, needs_arg = bool(parameters), any(p.default is p.empty for p in parameters)
    if colon and not takes_arg:
        raise UserError(f"--config: get_config() of {module.__file__} takes no argument; remove {colon}{arg}.")
    file = Path(str(module.__file__))
    arguments = (",".join([arg, *named]),) if needs_arg or (takes_arg and (colon or named)) else ()
    with mixers.reading(module) if not _is_shipped(file) else contextlib.nullcontext():
        with user_code.naming_the_line(file):
            values = module.get_config(*arguments)
        if not is_group(values):
            raise UserError(f"--config: get_config of {file} must return a ConfigDict or a dict, not {values!r}.")
        values = _with_located_mixers(_with_named_mixers(ConfigDict(values).to_dict(), overrides))
    config = ConfigDict(complete(Config, values))
    for key, text in overrides:
        if not _selects_mixer(key):
            override(config, key, text)
    return config
