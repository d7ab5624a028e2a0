"""The settings of a run as frozen dataclasses, the only source of their names, defaults and allowed values.

A mixer's own settings are the frozen `Config` in its file. None means "not set"; a comment says what applies then.
A config file is Python (`configs/top1_chunk.py`) and states only what differs (`seqjax.presets`); its result becomes
a `Config` here. Unknown keys, wrong types and incompatible values raise a `UserError` that names the key, the
nearest known key and the fix.
"""

import dataclasses
import json
from typing import Annotated, Any, Literal

from seqjax.config_checks import check
from seqjax.config_parse import MIXER, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """The MLP of a block."""

    kind: Literal["geglu", "swiglu", "gelu", "none"] = "geglu"
    dim: int | None = None  # inner width; None = 8/3 of the model width for gated kinds, 4 times for gelu
    bias: bool = False
    approximate_gelu: bool = False  # tanh form; the default is the exact erf
    rescale_init: bool = True  # the matrix that writes to the residual stream starts 1 / sqrt(2 L) smaller


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model."""

    vocab_size: int
    dim: int
    n_layers: int
    # The frozen `Config` of seqjax/mixers/NAME.py for every layer, or a tuple of them, repeated over the layers.
    mixer: Annotated[Any, MIXER]
    mlp: MlpConfig = MlpConfig()
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    init: Literal["gpt", "rwkv"] = "gpt"  # of embedding and head
    embed_norm: bool = False  # a norm directly after the embedding, as in RWKV
    learned_positions: bool = False  # a table [T, D] added to the embeddings, as in GPT
    tie_embeddings: bool = True
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # compute; auto = bfloat16 on accelerators, float32 on CPU
    residual_dtype: Literal["compute", "float32"] = "compute"
    remat: Literal["none", "full", "dots", "attention"] = "none"  # see seqjax/models/remat.py
    scan_layers: bool = True
    loss_chunk: int = 4096  # number of tokens of a device whose logits exist at a time in the loss

    @property
    def mixers(self) -> tuple[Any, ...]:
        """The settings of all mixers of the model, in the order in which the layers repeat them."""
        return self.mixer if isinstance(self.mixer, tuple) else (self.mixer,)

    @property
    def mixer_names(self) -> str:
        """The names of the mixers, each once, separated by commas."""
        return ", ".join(dict.fromkeys(mixer.name for mixer in self.mixers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training and evaluation data."""

    # blocks: written by seqjax.data.prepare; stream: shards, read directly; tfds: the same of tensorflow-datasets
    corpus: Literal["builtin", "blocks", "stream", "tfds"] = "builtin"
    # blocks: the directory; stream: a directory or a glob; tfds: the data directory, empty = its own; builtin: unused
    path: str = ""
    tfds: tuple[str, ...] = ()  # datasets of tfds: NAME, NAME/CONFIG or DOMAIN=NAME/CONFIG:VERSION
    tfds_feature: str = ""  # the one with the text; empty = the only text, or the one called text
    tfds_train_split: str = "train"  # or a slice of it, train[:90%]
    tfds_validation_split: str = ""  # empty = validation, or test, or a hundredth of the training documents
    tokenizer: Literal["byte", "mixtral", "huggingface"] = "byte"
    # mixtral: a sentencepiece file, empty = the one that mistral-common ships; huggingface: a public model's directory
    tokenizer_path: str = ""
    regime: Literal["limited", "mixed"] = "limited"
    train_domains: tuple[str, ...] = ()  # empty = the regime's training domains
    eval_domains: tuple[str, ...] = ()  # empty = the regime's: in-domain first, then out of domain
    weights: tuple[float, ...] = ()  # share of tokens per training domain; empty = natural (by tokens)
    seed: int = 0  # of the shuffle; `train.seed` does not affect the order of the data
    workers: int = 0  # Grain worker processes; 0 = threads in this process
    cache_dir: str = ""  # directory of the built-in corpus, and of copied blocks; empty = ~/.cache/seqjax


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and its learning-rate schedule."""

    lr: float = 2e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0  # global gradient norm at which gradients are clipped; None = not clipped
    warmup_steps: int = 2500
    final_lr: float = 0.0  # linear decay from lr to this over the rest of the run, or over every cooldown
    cooldown: float = 0.2  # share of the steps up to an end (train.ends) over which lr decays; unused without ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The length of the run and its batches."""

    steps: int
    # Shares of `steps` at which the run ends, each after a cooldown of its own from a trunk with a constant rate; the
    # last is 1. Empty: one end, with a linear decay over the whole run, as in the paper.
    ends: tuple[float, ...] = ()
    batch_size: int  # sequences per optimiser step, over all devices
    seq_len: int  # T: tokens per sequence that are predicted; a block holds T + 1
    per_device_batch_size: int | None = None  # sequences on a device at a time, at most; None = no limit
    accumulate: int | None = None  # micro-batches per step; None = as few as per_device_batch_size allows
    seed: int = 0  # of the initial parameters and of the sample at the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation: how often, and on how many tokens of every domain."""

    every: int  # training tokens between evaluations of every domain; 0 = only at the end
    tokens: int = 262_144  # at most this many per domain, the same ones at every evaluation
    batch_size: int | None = None  # sequences; None = as many as a training micro-batch
    seed: int = 0  # of the choice of blocks, if a domain has more than `tokens`
    path: tuple[
        str, ...
    ] = ()  # directories of prepared blocks to evaluate on as well: test sets (seqjax/data/test_sets.py)
    classes: bool = True  # sums of losses by class of token at the end, in one more evaluation (docs/data.md)
    entropy_tokens: int = 0  # at most, per domain, for the entropy of attention at the end; 0 = not measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often checkpoints are saved, and how many are kept."""

    every: int = 1000  # steps; 0 = only at the end and when the run is stopped
    keep: int = 2  # the newest ones
    keep_period: int | None = None  # those of steps that it divides are kept too, for good; None = only the newest
    ends: Literal["last", "all", "none"] = "last"  # which ends of a run with train.ends have a checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices per mesh axis (seqjax/sharding.py)."""

    data: int = -1  # -1 = all remaining devices
    fsdp: int = 1
    seq: int = 1  # devices that share every sequence, for long ones; it must divide train.seq_len and heads
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logging during the run."""

    every: int = 10  # steps between rows of metrics
    tensorboard: bool = True
    wandb: str | None = None  # project on Weights & Biases (pip install 'seqjax[wandb]'); None = not logged there
    profile_start: int | None = None  # first step of the profile; None = no profile
    profile_steps: int = 5
    sample_tokens: int = 200  # tokens of the text generated at the end of the run; 0 = none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. `name` and `size` only label it."""

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


def from_config_dict(config_dict: Any) -> Config:
    """Return the checked `Config` of a `ConfigDict` or nested dict; raise `UserError` for invalid settings."""
    config = parse(Config, config_dict)
    check(config)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Return the config as nested JSON-compatible dicts; `from_config_dict` reads it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """Return the keys whose values differ, as 'model.dim: 768 -> 1024'."""
    out = []
    for key in sorted(old.keys() | new.keys()):
        a, b, where = old.get(key), new.get(key), f"{path}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b, f"{where}.")
        elif isinstance(a, list) and isinstance(b, list) and _are_groups(a, b):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                out += differences(x, y, f"{where}[{i}].")
        elif a != b:
            out.append(f"{where}: {a!r} -> {b!r}")
    return out


def _are_groups(a: list[Any], b: list[Any]) -> bool:
    """Return whether both lists hold the same number of groups of settings."""
    return len(a) == len(b) > 0 and all(isinstance(x, dict) for x in (*a, *b))
