"""Sizes, regimes and the argument of a config file: `SIZE[,REGIME][,key=value ...]`.

    demo      (default) minutes on two CPU cores: byte tokenizer, embedded corpus
    debug     seconds
    110m      arXiv 2505.18522, Appendix A: small, T = 2,048, batch 256
    1b3       large, T = 2,048, batch 128
    135m_100k small, untied, T = 102,400 (the paper says "100k"), batch 8

Adam (0.9, 0.95), linear warm-up and linear decay, vocabulary 32,000, RoPE base 1e4 at 2k and 1e6 at 100k are the
paper's. Where it is silent: eps 1e-8, no weight decay, clip 1.0, final learning rate 0, 100B tokens.
"""

import ast
import re
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from seqjax.errors import UserError, nearest

REGIMES = ("limited", "mixed")
PAPER_TOKENS = 100_000_000_000


def _size(
    *,
    dim: int,
    layers: int,
    heads: int,
    seq_len: int,
    batch: int,
    lr: float,
    warmup: int,
    steps: int,
    **rest: Any,
) -> dict[str, Any]:
    return {
        "dim": dim, "layers": layers, "heads": heads, "seq_len": seq_len, "batch": batch, "lr": lr,
        "warmup": warmup, "steps": steps, "mlp_dim": 0, "chunk_size": 128, "rope_base": 1e4, "tie": True,
        "accumulate": 1, "remat": "none", "scan": True, "eval_every": 500_000_000, "eval_tokens": 4_194_304,
        "save_every": 1000, "entropy_tokens": 1_048_576, "builtin": False,
    } | rest  # fmt: skip


SIZES = {
    "demo": _size(
        dim=128, layers=4, heads=4, seq_len=512, batch=8, lr=2e-3, warmup=30, steps=300, chunk_size=64,
        eval_every=250_000, eval_tokens=32_768, entropy_tokens=32_768, save_every=100, builtin=True,
    ),
    "debug": _size(
        dim=64, layers=2, heads=2, seq_len=128, batch=4, lr=2e-3, warmup=5, steps=20, chunk_size=16,
        eval_every=5_000, eval_tokens=2_048, entropy_tokens=2_048, save_every=10, builtin=True,
    ),
    "110m": _size(
        dim=768, layers=12, heads=12, mlp_dim=2048, seq_len=2048, batch=256, lr=2e-4, warmup=2500,
        steps=PAPER_TOKENS // (256 * 2048), accumulate=16, scan=False,
    ),
    "1b3": _size(
        dim=2048, layers=24, heads=16, mlp_dim=5504, seq_len=2048, batch=128, lr=5e-5, warmup=5000,
        steps=PAPER_TOKENS // (128 * 2048), accumulate=16, remat="attention",
    ),
    "135m_100k": _size(
        dim=768, layers=12, heads=12, mlp_dim=2048, seq_len=102_400, batch=8, lr=2e-4, warmup=2500,
        steps=PAPER_TOKENS // (8 * 102_400), accumulate=8, remat="attention", rope_base=1e6, tie=False, scan=False,
    ),
}  # fmt: skip


def get_config(
    arg: str,
    *,
    name: str,
    mixer: dict[str, Any],
    pattern: tuple[dict[str, Any], ...] = (),
    model: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    entropy: bool = False,
) -> ConfigDict:
    """The pre-norm RMSNorm + GeGLU model of `arg`'s size around `mixer`, or around a `pattern` of mixers.

    Of a mixer's settings, `heads`, `rope_base` and `chunk_size` come from the size where they are 0. `model` gives,
    from the size, what else differs under `config.model`, by dotted key: `lambda size: {"mlp.kind": "none"}`.
    `entropy` is for configs that study how attention spreads: measure that at the end, on a million tokens per domain.
    """
    size_name, regime, overrides = _split(arg)
    size = SIZES[size_name]
    data = {"corpus": "builtin", "tokenizer": "byte"}
    if not size["builtin"]:
        data = {"corpus": "blocks", "tokenizer": "mixtral", "path": f"data/slimpajama-{size['seq_len']}"}
    config = ConfigDict(
        {
            "name": name,
            "size": size_name,
            "model": {
                # 256 bytes and two marks, rounded up to a multiple of 8
                "vocab_size": 264 if size["builtin"] else 32_000,
                "dim": size["dim"],
                "n_layers": size["layers"],
                "mixer": _sized(mixer, size),
                "pattern": tuple(_sized(m, size) for m in pattern),
                "mlp": {
                    "kind": "geglu", "dim": size["mlp_dim"], "bias": False, "approximate_gelu": False,
                    "rescale_init": True,
                },
                "norm": "rmsnorm",
                "norm_eps": 1e-5,
                "init": "gpt",
                "embed_norm": False,
                "learned_positions": False,
                "tie_embeddings": size["tie"],
                "dtype": "auto",
                "residual_dtype": "compute",
                "remat": size["remat"],
                "scan_layers": size["scan"],
                "loss_chunk": 4096,
            },
            "data": {
                "corpus": "", "path": "", "tokenizer": "", "tokenizer_path": "", "regime": regime, "train_domains": (),
                "eval_domains": (), "weights": (), "seed": 0, "workers": 0, "cache_dir": "",
            } | data,
            "train": {
                "steps": size["steps"], "batch_size": size["batch"], "seq_len": size["seq_len"],
                "accumulate": size["accumulate"], "seed": 0,
            },
            "optim": {
                "lr": size["lr"], "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0,
                "warmup_steps": size["warmup"], "final_lr": 0.0,
            },
            "eval": {
                "every": size["eval_every"], "tokens": size["eval_tokens"], "batch_size": 0, "seed": 0,
                "entropy_tokens": size["entropy_tokens"] if entropy else 0,
            },
            "checkpoint": {"every": size["save_every"], "keep": 2},
            "mesh": {"data": -1, "fsdp": 1, "tensor": 1},
            "log": {"every": 10, "tensorboard": True, "profile_start": 0, "profile_steps": 5, "sample_tokens": 200},
        }
    )  # fmt: skip
    changes = model(size) if model else {}
    config.update_from_flattened_dict({f"model.{key}": value for key, value in changes.items()})
    for key, value in overrides:
        _override(config, key, value)
    return config


def _sized(mixer: dict[str, Any], size: dict[str, Any]) -> dict[str, Any]:
    return {k: size[k] if k in ("heads", "rope_base", "chunk_size") and not v else v for k, v in mixer.items()}


def _split(arg: str) -> tuple[str, str, list[tuple[str, str]]]:
    size, regime, overrides = "demo", "limited", []
    # a comma inside brackets belongs to the value: data.weights=(0.7,0.3)
    for part in filter(None, (p.strip() for p in re.split(r",(?![^(\[]*[)\]])", arg or ""))):
        key, equals, value = part.partition("=")
        if equals:
            overrides.append((key, value))
        elif part in SIZES:
            size = part
        elif part in REGIMES:
            regime = part
        else:
            raise UserError(
                f"--config=FILE.py:{arg}: {part!r} is no size or regime.{nearest(part, [*SIZES, *REGIMES])}"
            )
    return size, regime, overrides


def _override(config: ConfigDict, key: str, text: str) -> None:
    *groups, last = key.split(".")
    node: Any = config
    for group in groups:
        if not isinstance(node.get(group), ConfigDict):
            raise UserError(f"{key}={text}: there is no group {group!r}.{nearest(group, node.keys())}")
        node = node[group]
    if last not in node:
        raise UserError(f"{key}={text}: there is no setting {last!r}.{nearest(last, node.keys())}")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    with node.ignore_type():  # types are checked, with better words, by seqjax.config
        node[last] = value
