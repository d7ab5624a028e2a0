"""The settings of a run: frozen dataclasses, which alone say what there is, its default and its allowed values.

A mixer's own settings are the frozen `Config` in its file. None is "not set": what then holds stands beside the field.
A config file is Python (`configs/top1_chunk.py`) and says only what differs (`seqjax.presets`); what it returns becomes
a `Config` here. Unknown keys, wrong types and values that cannot work together are `UserError`s that name the key, the
nearest known one and the fix.
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
    """What is trained."""

    vocab_size: int
    dim: int
    n_layers: int
    # The frozen `Config` of seqjax/mixers/NAME.py for every layer, or a tuple of them, repeated over the layers.
    mixer: Annotated[Any, MIXER]
    mlp: MlpConfig = MlpConfig()
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    init: Literal["gpt", "rwkv"] = "gpt"  # of embedding and head
    embed_norm: bool = False  # a norm right after the embedding, as RWKV has it
    learned_positions: bool = False  # a table [T, D] added to the embeddings, as GPT has it
    tie_embeddings: bool = True
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # compute; auto = bfloat16 on accelerators, float32 on CPU
    residual_dtype: Literal["compute", "float32"] = "compute"
    remat: Literal["none", "full", "dots", "attention"] = "none"  # see seqjax/models/remat.py
    scan_layers: bool = True
    loss_chunk: int = 4096  # tokens whose logits exist at a time in the loss

    @property
    def mixers(self) -> tuple[Any, ...]:
        """The settings of every mixer of the model, one or several, in the order in which layers repeat them."""
        return self.mixer if isinstance(self.mixer, tuple) else (self.mixer,)

    @property
    def mixer_names(self) -> str:
        """The names of the mixers, each once, separated by commas."""
        return ", ".join(dict.fromkeys(mixer.name for mixer in self.mixers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """On what."""

    # blocks are made by seqjax.data.prepare, stream reads jsonl.zst as it lies
    corpus: Literal["builtin", "blocks", "stream"] = "builtin"
    path: str = ""  # blocks: the directory; stream: a directory or a glob; builtin: unused
    tokenizer: Literal["byte", "mixtral"] = "byte"
    tokenizer_path: str = ""  # a sentencepiece model file; empty = the one that mistral-common carries
    regime: Literal["limited", "mixed"] = "limited"
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
    clip_norm: float | None = 1.0  # largest global norm of the gradient; None = not clipped
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
    batch_size: int | None = None  # sequences; None = the training micro-batch
    seed: int = 0  # which blocks, where a domain has more than `tokens`
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
    profile_start: int | None = None  # step; None = no profile
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
        elif isinstance(a, list) and isinstance(b, list) and _are_groups(a, b):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                out += differences(x, y, f"{where}[{i}].")
        elif a != b:
            out.append(f"{where}: {a!r} -> {b!r}")
    return out


def _are_groups(a: list[Any], b: list[Any]) -> bool:
    """Whether both lists hold as many groups of settings."""
    return len(a) == len(b) > 0 and all(isinstance(x, dict) for x in (*a, *b))
