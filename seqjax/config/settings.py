"""A run's settings as frozen dataclasses: names, defaults, bounds and help text.

None means "not set"; a comment gives the value used instead. A config file is Python (`configs/top1_chunk.py`) and
states only differences (`seqjax.config.presets`); its result becomes a `Config` here. Unknown keys, wrong types, values
outside their bounds and incompatible values raise a `UserError` that names the key, the nearest known key and the fix.
A mixer checks its settings in its constructor.
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from typing import Annotated, Any, Literal

from seqjax import mixers
from seqjax.config.parse import MIXER, is_mixer, parse
from seqjax.errors import UserError
from seqjax.fields import Bounds, hints_of, plain

Share = Annotated[float, Bounds(0, 1)]
Positive = Annotated[int, Bounds(1)]
PositiveOrNone = Annotated[int | None, Bounds(1)]
NotNegative = Annotated[int, Bounds(0)]
CanonPlaces = Literal["none", "A", "C", "D", "AC", "AD", "CD", "ACD"]
Size = Annotated[int, Bounds(1, 1 << 31)]  # length of an array axis
SizeOrNone = Annotated[int | None, Bounds(1, 1 << 31)]
MOST_TOKENS = 1 << 28  # per batch
Seed = Annotated[int, Bounds(0, 1 << 32)]  # JAX uses 32 bits of a seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """The MLP of a block."""

    kind: Literal["geglu", "swiglu", "gelu", "none"] = "geglu"
    dim: SizeOrNone = None  # inner width; None = 8/3 of the model width for gated kinds, 4 times for gelu
    bias: bool = False
    approximate_gelu: bool = False  # tanh form; the default is the exact erf
    rescale_init: bool = True  # initial scale 1 / sqrt(2 L) for the matrix that writes to the residual stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model."""

    vocab_size: Size
    dim: Size
    n_layers: Annotated[int, Bounds(1, 10_001)]
    # The frozen settings of seqjax/mixers/NAME.py for every layer, or a tuple of them, repeated over the layers.
    mixer: Annotated[Any, MIXER]
    mlp: MlpConfig = MlpConfig()
    canon: CanonPlaces = "none"  # x + conv(x) over 4 tokens: mixer input (A), MLP input (C), inside the MLP (D)
    token_shift: bool = False  # mixes the mixer's input with the previous token's, by a learned share per channel
    # Attention residuals (seqjax/models/attn_residual.py): sub-layers per block, two sub-layers a layer with an MLP;
    # every sub-layer reads a softmax mix of the blocks' outputs. None = the usual residual stream.
    attn_residual: PositiveOrNone = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Annotated[float, Bounds(1e-30, 1)] = 1e-5
    init: Literal["gpt", "rwkv"] = "gpt"  # initialiser of embedding and head
    embed_norm: bool = False  # a norm directly after the embedding, as in RWKV
    learned_positions: bool = False  # a table [T, D] added to the embeddings, as in GPT
    tie_embeddings: bool = True
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # compute; auto = bfloat16 on accelerators, float32 on CPU
    residual_dtype: Literal["compute", "float32"] = "compute"
    remat: Literal["none", "full", "dots", "attention"] = "none"  # see seqjax/models/remat.py
    scan_layers: bool = True
    loss_chunk: Positive = 4096  # tokens per device with logits in memory at a time in the loss
    loss_implementation: str | None = None  # backend of the training loss and its gradient; None = chosen by device

    @property
    def mixers(self) -> tuple[Any, ...]:
        """The settings of all mixers, in the order in which the layers repeat them."""
        return self.mixer if isinstance(self.mixer, tuple) else (self.mixer,)

    @property
    def mixer_names(self) -> str:
        """The distinct mixer names, separated by commas."""
        return ", ".join(dict.fromkeys(mixer.name for mixer in self.mixers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training and evaluation data."""

    # blocks: written by seqjax.data.prepare; stream: shards, read directly; tfds: tensorflow-datasets, read directly.
    # auto: blocks if there is a path, tfds if there are tfds datasets, otherwise builtin
    corpus: Literal["auto", "builtin", "blocks", "stream", "tfds"] = "builtin"
    # blocks: the directory; stream: a directory or a glob; tfds: the data directory, empty = tfds's default; builtin:
    # unused
    path: str = ""
    tfds: tuple[str, ...] = ()  # tfds datasets: NAME, NAME/CONFIG or DOMAIN=NAME/CONFIG:VERSION
    tfds_feature: str = ""  # the feature with the text; empty = the only text feature, or `text`
    tfds_train_split: str = "train"  # or a slice of it, train[:90%]
    tfds_validation_split: str = ""  # empty = validation, or test, or 1% of the training documents
    tokenizer: Literal["byte", "mixtral", "huggingface"] = "byte"
    # mixtral: a sentencepiece file, empty = mistral-common's; huggingface: a public model's directory
    tokenizer_path: str = ""
    regime: Literal["limited", "mixed"] = "limited"
    train_domains: tuple[str, ...] = ()  # empty = the regime's training domains
    eval_domains: tuple[str, ...] = ()  # empty = the regime's: in-domain first, then OOD
    # States, convolutions, attention and positions restart at each document of a block; needs mixers that support it
    reset: bool = False
    weights: tuple[float, ...] = ()  # share of tokens per training domain; empty = natural (by tokens)
    seed: Seed = 0  # seed of the shuffle; `train.seed` does not affect the data order
    workers: Annotated[int, Bounds(0, 1025)] = 0  # Grain worker processes; 0 = threads in this process
    cache_dir: str = ""  # directory for the built-in corpus and copied blocks; empty = ~/.cache/seqjax


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and its learning-rate schedule."""

    # muon and normuon update the matrices with both sides of at least 64, and Adam the other parameters
    name: Literal["adam", "muon", "normuon"] = "adam"  # see docs/protocol.md
    lr: Annotated[float, Bounds(0)] = 2e-4  # rate of Adam, or of Muon's matrices
    adam_lr: Annotated[float | None, Bounds(0)] = None  # rate of the parameters that Muon leaves to Adam; None = lr
    # Factor on Muon's update of a matrix [in, out]. spectral: sqrt(max(1, out / in)); rms: 0.2 sqrt(max(in, out))
    muon_scale: Literal["spectral", "rms"] = "spectral"  # spectral is for rates near 0.02, rms for Adam's rates
    muon_momentum: Share = 0.95
    b1: Share = 0.9
    b2: Share = 0.95
    eps: Annotated[float, Bounds(0)] = 1e-8
    weight_decay: Annotated[float, Bounds(0)] = 0.0
    clip_norm: Annotated[float | None, Bounds(0)] = 1.0  # global norm at which gradients are clipped; None = never
    schedule: Literal["linear", "cosine"] = "linear"  # decay of lr after warmup; train.ends select a WSD schedule
    warmup_steps: NotNegative = 2500
    final_lr: Annotated[float, Bounds(0)] = 0.0  # lr decays to this, over the rest of the run or a cooldown
    cooldown: Share = 0.2  # lr decays over this share of the steps up to an end (train.ends); unused without ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The length of the run and its batches."""

    steps: Annotated[int, Bounds(1, 2**31)]  # the optimiser counts steps in 32 bits
    # Shares of `steps` with an end, each after a cooldown that branches off the constant-rate run (WSD schedule); the
    # last is 1. Empty: one end, with a linear decay over the whole run, as in the paper.
    ends: tuple[float, ...] = ()
    batch_size: Size  # sequences per optimiser step, over all devices
    seq_len: Size  # T: tokens per sequence that are predicted; a block holds T + 1
    per_device_batch_size: PositiveOrNone = None  # most sequences on a device at a time; None = no limit
    accumulate: PositiveOrNone = None  # micro-batches per step; None = as few as per_device_batch_size allows
    seed: Seed = 0  # seed for the initial parameters and the final sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How often to evaluate, and on how many tokens per domain."""

    every: NotNegative  # training tokens between evaluations of all domains; 0 = only at the end
    tokens: Positive = 262_144  # most tokens per domain; every evaluation uses the same tokens
    batch_size: PositiveOrNone = None  # sequences; None = the size of a training micro-batch
    seed: Seed = 0  # seed for choosing blocks, if a domain has more than `tokens`
    path: tuple[
        str, ...
    ] = ()  # directories of prepared blocks that are evaluated too: test sets (seqjax/data/corpora.py)
    classes: bool = True  # loss sums by token class at the end, in one more evaluation (docs/data.md)
    entropy_tokens: NotNegative = 0  # most tokens per domain for the attention entropy at the end; 0 = not measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often to save checkpoints, and how many to keep."""

    every: NotNegative = 1000  # steps; 0 = only at the end and when the run is stopped
    keep: Positive = 2  # number of newest checkpoints to keep
    keep_period: PositiveOrNone = None  # also keep checkpoints at multiples of this step; None = only the newest
    ends: Literal["last", "all", "none"] = "last"  # which ends of a run with train.ends keep a checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices per mesh axis (seqjax/sharding.py)."""

    data: int = -1  # -1 = all remaining devices
    fsdp: int = 1
    seq: int = 1  # devices that share each sequence, for long ones; must divide train.seq_len and heads
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logging during the run."""

    every: Positive = 10  # steps between metric rows
    tensorboard: bool = True
    wandb: str | None = None  # Weights & Biases project (pip install 'seqjax[wandb]'); None = not logged there
    profile_start: PositiveOrNone = None  # first profiled step; None = no profile
    profile_steps: Positive = 5
    sample_tokens: NotNegative = 200  # tokens generated at the end; 0 = none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run; `name` and `size` are only labels."""

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
    """Return the checked `Config` for a `ConfigDict` or nested dict.

    Raises `UserError` for invalid settings.
    """
    config = parse(Config, config_dict)
    if config.data.corpus == "auto":
        corpus = "tfds" if config.data.tfds else "blocks" if config.data.path else "builtin"
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, corpus=corpus))
    check(config)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Return the config as nested JSON-compatible dicts.

    `from_config_dict` reads it back.
    """
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """Return the keys with different values, as 'model.dim: 768 -> 1024'."""
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
    """Return whether both lists hold the same number of settings groups."""
    return len(a) == len(b) > 0 and all(isinstance(x, dict) for x in (*a, *b))


def check(config: Any) -> None:
    """Raise `UserError`, naming the key and the fix, if a `Config` is invalid."""
    model, train, data = config.model, config.train, config.data
    for key in ("name", "size"):
        label = getattr(config, key)
        if not label.strip() or not label.isprintable() or {"/", "\\"} & {*label}:
            raise UserError(
                f"config.{key}={label!r} labels the run and its directory: use a printable word without slashes."
            )
    _check_optim(config)
    every, period = config.checkpoint.every, config.checkpoint.keep_period
    if period is not None and (not every or period % every):
        raise UserError(
            f"config.checkpoint.keep_period={period} keeps saved checkpoints, so it must be a multiple of "
            f"config.checkpoint.every={every}."
        )
    if train.ends:
        _check_ends(config)
    if train.accumulate is not None and train.batch_size % train.accumulate:
        raise UserError(
            f"config.train.batch_size={train.batch_size} must be a multiple of "
            f"config.train.accumulate={train.accumulate}."
        )
    for key, batch in (("train.batch_size", train.batch_size), ("eval.batch_size", config.eval.batch_size or 1)):
        if batch * train.seq_len >= MOST_TOKENS:
            raise UserError(
                f"config.{key}={batch} sequences of config.train.seq_len={train.seq_len} exceed {MOST_TOKENS:,} "
                "tokens, too many for one batch; reduce one of the two."
            )
    if data.corpus in ("blocks", "stream") and not data.path:
        raise UserError(
            f"config.data.corpus={data.corpus!r} needs config.data.path: the directory that "
            "`seqjax prepare` wrote (blocks) or that holds the shards (stream)."
        )
    if bool(data.tfds) != (data.corpus == "tfds"):
        raise UserError(
            "config.data.corpus='tfds' and config.data.tfds, its datasets, must be set together: set both, for example "
            "--config.data.corpus=tfds --config.data.tfds=\"('lm1b',)\", or neither."
        )
    if data.weights and len(data.weights) != len(data.train_domains):
        raise UserError(
            f"config.data.weights has {len(data.weights)} values for {len(data.train_domains)} "
            "config.data.train_domains; set both, with one weight per domain."
        )
    if model.n_layers % len(model.mixers):
        raise UserError(
            f"config.model.mixer has {len(model.mixers)} mixers, which do not divide config.model.n_layers="
            f"{model.n_layers}; change one of the two."
        )
    _check_block(model)
    if data.reset:
        _check_reset(model)
    # A mixer checks its settings, e.g. that its chunk fits the sequence.
    for i, mixer in enumerate(model.mixers):
        path = f"config.model.mixer[{i}]" if isinstance(model.mixer, tuple) else "config.model.mixer"
        mixers.check(mixer, dim=model.dim, n_layers=model.n_layers, seq_len=train.seq_len, path=path)


def _check_block(model: Any) -> None:
    """Raise `UserError` for pre-norm block settings that the model's blocks lack."""
    if model.mlp.kind == "none" and {"C", "D"} & {*model.canon}:
        raise UserError(
            f"config.model.canon={model.canon!r} needs an MLP, but config.model.mlp.kind='none'; set "
            f"config.model.canon={'A' if 'A' in model.canon else 'none'!r}."
        )
    for name in dict.fromkeys(mixer.name for mixer in model.mixers):
        block = mixers.load(name).block
        if block is not None and model.attn_residual is not None:
            raise UserError(
                f"config.model.attn_residual={model.attn_residual} needs the pre-norm block, but {name} has another "
                "block; set config.model.attn_residual=None, or choose another mixer."
            )
        if block is not None and not block.has_switches:
            for key, neutral in (("canon", "none"), ("token_shift", False)):
                if getattr(model, key) != neutral:
                    raise UserError(
                        f"config.model.{key}={getattr(model, key)!r} needs the pre-norm block, but {name} has another "
                        f"block; set config.model.{key}={neutral!r}, or choose another mixer."
                    )


def _check_reset(model: Any) -> None:
    """Raise `UserError` for a mixer or block that cannot keep packed documents apart."""
    for name in dict.fromkeys(mixer.name for mixer in model.mixers):
        mixer = mixers.load(name)
        lacking = "" if mixer.resets else f"the mixer {name}"
        if not lacking and mixer.block is not None and not mixer.block.resets:
            lacking = f"{mixer.block.__name__}, the block of {name},"
        if lacking:
            raise UserError(
                f"config.data.reset=True: {lacking} cannot restart at a document. Set config.data.reset=False, or "
                "choose a mixer that can, such as gated_deltanet (docs/data.md lists them)."
            )


def _check_optim(config: Any) -> None:
    """Raise `UserError` for optimiser settings that have no effect or exclude each other."""
    optim, default = config.optim, OptimConfig()
    if optim.clip_norm == 0:
        raise UserError("config.optim.clip_norm=0 would stop every step; None disables clipping.")
    for key in ("adam_lr", "muon_scale", "muon_momentum") if optim.name == "adam" else ():
        if (value := getattr(optim, key)) != getattr(default, key):
            raise UserError(
                f"config.optim.{key}={value!r} has no effect with config.optim.name='adam'; set "
                "config.optim.name='muon', or leave it out."
            )
    if optim.adam_lr is not None and not optim.lr:
        raise UserError(
            f"config.optim.lr=0 and config.optim.adam_lr={optim.adam_lr:g}: both rates follow the schedule of "
            "config.optim.lr, so set it above 0."
        )
    if optim.schedule != "linear" and config.train.ends:
        raise UserError(
            f"config.optim.schedule={optim.schedule!r} decays the rate over the whole run, and config.train.ends="
            f"{config.train.ends} keep it constant until a cooldown. Leave one of them out."
        )


def _check_ends(config: Any) -> None:
    """Raise `UserError` for invalid ends.

    The ends must ascend to the last step, and every cooldown must begin after warmup.
    """
    ends, steps = config.train.ends, config.train.steps
    cooldown, warmup = config.optim.cooldown, config.optim.warmup_steps
    end_steps = [round(share * steps) for share in ends]
    if not (ends[0] > 0 and ends[-1] == 1 and end_steps == sorted(set(end_steps))):
        raise UserError(
            f"config.train.ends={ends} must be shares of config.train.steps={steps} that ascend to 1, at distinct "
            "steps, such as (0.5, 0.65, 0.8, 1)."
        )
    if cooldown == 0:
        raise UserError(
            "config.optim.cooldown=0 would leave config.train.ends at the full learning rate; set the share of an "
            "end's steps in which the rate decays, such as 0.2."
        )
    cooldown_start = end_steps[0] - max(1, round(cooldown * end_steps[0]))
    if cooldown_start < max(1, warmup):
        raise UserError(
            f"The cooldown to the first of config.train.ends={ends} begins after step {cooldown_start}, which "
            f"overlaps with the warmup of config.optim.warmup_steps={warmup}. Set a later first end, a shorter "
            f"warmup, or a smaller config.optim.cooldown than {cooldown}."
        )


KINDS = {int: "INT", float: "FLOAT", str: "TEXT", bool: "True|False"}
WIDTH = 54


def help_text() -> str:
    """Return all settings with types or allowed values, defaults and comments."""
    lines = [
        "settings, as --config.KEY=VALUE or as key=value after the config's name; parentheses show the default if",
        "neither the config nor its size sets a value:",
        "",
        *_lines(Config, ""),
    ]
    for name in mixers.names():
        lines += ["", f"  settings of the mixer {name} (--config.model.mixer.KEY):", ""]
        lines += _lines(mixers.settings_class(name), "model.mixer.", source=mixers.load(name).__init__)
    return "\n".join(lines)


def kind_of(hint: Any) -> str:
    """Return a setting's type for help: INT, TEXT, a|b|c, (TEXT, ...), INT or None."""
    hint = plain(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("None" if arg is type(None) else kind_of(arg) for arg in args)
    if origin is typing.Literal:
        return "|".join(map(str, args))
    if origin is tuple:
        return f"({kind_of(args[0])}, ...)"
    return KINDS.get(hint, getattr(hint, "__name__", str(hint)))


def _lines(cls: Any, prefix: str, *, source: Any = None) -> list[str]:
    comments = _comments(source or cls)
    lines = []
    for field, hint in zip(dataclasses.fields(cls), hints_of(cls).values(), strict=True):
        key = f"{prefix}{field.name}"
        if is_mixer(hint):
            lines.append(f"  --config.{key}.name={'|'.join(mixers.names())}")
        elif dataclasses.is_dataclass(hint):
            lines += _lines(hint, f"{key}.")
        elif (prefix, field.name) != ("model.mixer.", "name"):
            required = field.default is dataclasses.MISSING
            default = "(no default)" if required else f"({field.default!r})" if field.default != "" else "('')"
            left = f"  --config.{key}={kind_of(hint)}"
            lines.append(f"{left:<{WIDTH}} {default}  {comments.get(field.name, '')}".rstrip())
    return lines


def _comments(source: Any) -> dict[str, str]:
    """Return the comments at the ends of field or argument lines, by name.

    `source` is a dataclass or a function.
    """
    try:
        help_text = inspect.getsource(source)
    except (OSError, TypeError):  # defined in a shell
        return {}
    return dict(re.findall(r"^ +(\w+): [^#\n]*  # (.*)$", help_text, re.M))
