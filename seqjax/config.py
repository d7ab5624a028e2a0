"""Frozen configuration dataclasses, made from an `ml_collections.ConfigDict` and checked on the way.

A config file is Python (`configs/top1_chunk.py`); what it returns becomes a `Config` here. Unknown keys, wrong
types and values that cannot work together are `UserError`s that name the key, the nearest known one and the fix.
"""

import dataclasses
import json
import re
import types
import typing
from typing import Any, TypeVar

from seqjax import mixers
from seqjax.config_checks import check
from seqjax.errors import UserError, nearest

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """The MLP of a block."""

    kind: str = "geglu"  # geglu | swiglu | gelu | none
    dim: int = 0  # inner width; 0 = 8/3 of the model width for gated kinds, 4 times for gelu
    bias: bool = False
    approximate_gelu: bool = False  # tanh form; the default is the exact erf
    rescale_init: bool = True  # the matrix that writes to the residual stream starts 1 / sqrt(2 L) smaller


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained."""

    vocab_size: int
    dim: int
    n_layers: int
    mixer: Any  # the frozen `Config` of seqjax/mixers/NAME.py
    pattern: tuple[Any, ...] = ()  # several of those, repeated over the layers, instead of `mixer` in every layer
    mlp: MlpConfig = MlpConfig()
    norm: str = "rmsnorm"  # rmsnorm | layernorm
    norm_eps: float = 1e-5
    init: str = "gpt"  # of embedding and head: gpt | rwkv
    embed_norm: bool = False  # a norm right after the embedding, as RWKV has it
    learned_positions: bool = False  # a table [T, D] added to the embeddings, as GPT has it
    tie_embeddings: bool = True
    dtype: str = "auto"  # compute: auto (bfloat16 on accelerators, float32 on CPU) | bfloat16 | float32
    residual_dtype: str = "compute"  # compute | float32
    remat: str = "none"  # none | full | dots | attention; see models/remat.py
    scan_layers: bool = True
    loss_chunk: int = 4096  # tokens whose logits exist at a time in the loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """On what."""

    corpus: str = "builtin"  # builtin | blocks (made by seqjax.data.prepare) | stream (jsonl.zst as it lies)
    path: str = ""  # blocks: the directory; stream: a directory or a glob; builtin: unused
    tokenizer: str = "byte"  # byte | mixtral
    tokenizer_path: str = ""  # a sentencepiece model file; empty = the one that mistral-common carries
    regime: str = "limited"  # limited | mixed
    train_domains: tuple[str, ...] = ()  # empty = what the regime trains on
    eval_domains: tuple[str, ...] = ()  # empty = what the regime evaluates: in-domain first, then out of domain
    weights: tuple[float, ...] = ()  # share of tokens per training domain; empty = natural (by tokens)
    seed: int = 0  # of the shuffle; the order of the data depends on this alone
    workers: int = 0  # Grain worker processes; 0 = threads in this process
    cache_dir: str = ""  # where the builtin corpus is kept; empty = ~/.cache/seqjax


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How parameters move."""

    lr: float = 2e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # global norm; 0 = off
    warmup_steps: int = 2500
    final_lr: float = 0.0  # linear decay from lr to this over the rest of the run


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, in which portions."""

    steps: int
    batch_size: int  # sequences per optimiser step, over all devices
    seq_len: int  # T: tokens per sequence that are predicted; a block holds T + 1
    accumulate: int = 1  # micro-batches per step
    seed: int = 0  # of the parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When and on how much every domain is evaluated."""

    every: int  # training tokens between evaluations of every domain; 0 = only at the end
    tokens: int = 262_144  # at most so many per domain, always the same ones
    batch_size: int = 0  # sequences; 0 = the training micro-batch
    entropy_tokens: int = 0  # per domain at most, to measure the entropy of attention at the end; 0 = not measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, how many to keep."""

    every: int = 1000  # steps; 0 = only at the end and when told to stop
    keep: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices per mesh axis (seqjax/sharding.py)."""

    data: int = -1  # -1 = the devices that are left
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written while the run goes."""

    every: int = 10  # steps
    tensorboard: bool = True
    profile_start: int = 0  # step; 0 = no profile
    profile_steps: int = 5
    sample_tokens: int = 200  # length of the text that the run generates when it ends; 0 = none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One run. `name` and `size` label it; everything else decides it."""

    name: str
    size: str
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    log: LogConfig = LogConfig()


def parse(cls: type[T], values: Any, path: str = "config") -> T:
    """Build the dataclass `cls` from a mapping, recursively; every complaint names the full key."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls))}
    items = dict(values.items())
    for key in items:
        if key not in fields:
            raise UserError(f"{path}.{key} is not a setting.{nearest(key, fields)}")
    kwargs = {}
    for name, field in fields.items():
        if name not in items:
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required:
                raise UserError(f"{path}.{name} is missing; set it in the config file.")
            continue
        kwargs[name] = _value(hints[name], items[name], f"{path}.{name}")
    return cls(**kwargs)


def _value(hint: Any, value: Any, path: str) -> Any:
    if re.search(r"\.model\.(mixer|pattern\[\d+\])$", path):
        return _mixer(value, path)
    if dataclasses.is_dataclass(hint):
        if not hasattr(value, "items"):
            raise UserError(f"{path} must be a group of settings, not {value!r}.")
        return parse(typing.cast(type, hint), value, path)
    origin = typing.get_origin(hint)
    if origin is tuple:
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise UserError(f"{path} must be a list, not {value!r}; write ({value!r},).")
        element = typing.get_args(hint)[0]
        return tuple(_value(element, v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        return _value(next(o for o in options if o is not type(None)), value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        raise UserError(f"{path} must be {hint.__name__}, not {type(value).__name__} {value!r}.")
    return value


def _mixer(value: Any, path: str) -> Any:
    items = dict(value.items()) if hasattr(value, "items") else {}
    name = items.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"{path}.name must name a mixer.{nearest(str(name), mixers.names())}")
    return parse(mixers.load(name).Config, items | {"name": name}, path)


def from_config_dict(config_dict: Any) -> Config:
    """A `ConfigDict` (or nested dict) -> a checked `Config`; raises `UserError`."""
    config = parse(Config, config_dict)
    check(config)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """The config as nested plain dicts, ready for JSON; `from_config_dict` reads it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """The keys whose values differ, as 'model.dim: 768 -> 1024'."""
    out = []
    for key in sorted(old.keys() | new.keys()):
        a, b, where = old.get(key), new.get(key), f"{path}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b, f"{where}.")
        elif a != b:
            out.append(f"{where}: {a!r} -> {b!r}")
    return out
