"""Test helpers: tiny configs of all mixers, tiny blocks on disk, and runs in separate processes."""

import collections
import dataclasses
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax import mixers, store
from seqjax.config import Config, from_config_dict
from seqjax.data import blocks, document_index, manifests
from seqjax.data.slimpajama import NAMES as DOMAINS
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.files import write_json
from seqjax.models import Model
from seqjax.testing import random_params as random_params  # for the tests, as support.random_params
from seqjax.training import metrics

ROOT = Path(__file__).parent.parent
SEQ_LEN = 32

SMALL_SSM = {"state": 8, "head_dim": 16}
# Variants for the contract tests by mixer; expensive tests use only the first one. A mixer that is not
# listed is tested with its config file.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "transformer": {"full": {}, "window": {"window": 5}},
    "transformer_pp": {
        "full": {},
        "window": {"window": 5},
        "gqa": {"kv_heads": 2},
        "llama3": {
            "rope_scaling": "llama3",
            "rope_factor": 4.0,
            "rope_high_freq_factor": 2.0,
            "rope_original_len": 8,
            "qk_norm": True,
            "qkv_bias": True,
        },
        "alibi": {"position": "alibi"},
        "const_k": {"const": "k"},
        "const_qk": {"const": "qk"},
        "temperature": {"temperature": 0.5},
        "alibi_window_gqa": {"position": "alibi", "window": 5, "kv_heads": 2},
        "bias_norm": {"bias": True, "qk_norm": True, "position": "none"},
        "conv": {"conv": True, "qk_norm": True},
        "conv_window_gqa": {"conv": True, "window": 5, "kv_heads": 2, "gate": True},
        "conv_alibi": {"conv": True, "position": "alibi", "bias": True},
        "share_full_norm": {"rope_share": 0.25, "qk_norm": "full", "gate": True},
    },
    "top1_chunk": {
        "exact": {},
        "best_key": {"selection": "best_key"},
        "best_key_int8": {"selection": "best_key_int8"},
        "approx": {"selection": "approx"},
        "gqa": {"kv_heads": 2},
        "approx_gqa": {"selection": "approx", "kv_heads": 1},
        "top_k": {"top_k": 3},
        "approx_top_k": {"selection": "approx", "top_k": 2},
        "shortlist": {"selection": "shortlist", "shortlist": 2, "table": "mean_eigen"},
        "shortlist_gqa": {
            "selection": "shortlist",
            "shortlist": 1,
            "table": "sub_means",
            "chunk_size": 8,
            "kv_heads": 2,
        },
        "random": {"selection": "random", "top_k": 2},
        "conv": {"conv": True, "gate": True},
        "conv_approx_gqa": {"conv": True, "selection": "approx", "kv_heads": 2},
    },
    "fox": {
        "full": {},
        "window_gqa": {"window": 5, "kv_heads": 2},
        "pro": {"kv_shift": True, "qk_norm": True, "output_gate": True},
        "conv": {"conv": True},
    },
    "path": {
        "full": {"chunk_size": 4, "path_rank": 3},
        "gqa_gates": {"chunk_size": 5, "kv_heads": 2, "forget_gate": True, "qk_norm": True},
    },
    "ttt_linear": {"default": {"mini_batch": 4}, "base": {"mini_batch": 5, "conv": False, "gate": False}},
    "parallax": {"full": {}, "gqa": {"kv_heads": 2, "qk_norm": True, "gate": True}},
    "wall": {"full": {}, "gqa": {"kv_heads": 2, "qk_norm": True, "gate": True}},
    "nsa": {
        "gqa": {"kv_heads": 2, "blocks": 4, "window": 5},
        "conv_gqa": {"kv_heads": 2, "blocks": 4, "window": 5, "conv": True, "qk_norm": True},
    },
    "msa": {
        "gqa": {"kv_heads": 2, "block_size": 4, "blocks": 3},
        "conv_gqa": {
            "kv_heads": 2,
            "block_size": 5,
            "blocks": 2,
            "conv": True,
            "gate": True,
            "index_dim": 6,
            "index_rope": 0,
        },
    },
    "dsa": {
        "full": {"top_k": 6, "index_heads": 4, "index_dim": 8, "index_rope": 4},
        "conv_gqa": {"top_k": 3, "index_heads": 2, "kv_heads": 2, "conv": True, "gate": True, "qk_norm": True},
    },
    "rwkv7_shell": {
        "top1_exact": {},
        "top1_approx": {"core": "top1_approx"},
        "full": {"core": "full"},
        "window": {"core": "window", "window": 5},
        "full_norm": {"core": "full", "qk_norm": True},
        "window_norm": {"core": "window", "window": 5, "qk_norm": True},
        "bare": {"core": "full", "token_shift": False, "value_residual": False, "gate": False, "head_norm": False},
    },
    "gated_deltaproduct": {
        "default": {},
        "three_steps": {"steps": 3, "decay": False, "allow_negative_eigenvalues": False},
    },
    "gated_deltanet": {"default": {}, "bare": {"conv": False, "gate": False}, "value_heads": {"value_heads": 8}},
    "kda": {
        "default": {},
        "bounded": {"lower_bound": -5.0, "gate_rank": "full"},
        "channel_gates": {"channel_gates": True},
    },
    "mla": {
        "rope": {},
        "gated": {"position": "none", "gate": True, "q_rank": 7, "value_head_dim": 14},
    },
    "based_linear": {"default": {"feature_dim": 6}, "odd": {"feature_dim": 5}},
    "mamba1": {
        "full": {},
        "one": {"decay": "one"},
        "one_dt": {"decay": "one_dt"},
        "bare": {"decay": "none", "conv": False},
    },
    "mamba2": {
        "full": SMALL_SSM,
        "one": SMALL_SSM | {"decay": "one"},
        "bare": SMALL_SSM | {"decay": "none", "conv": False, "norm": False, "gate": False},
    },
    "log_linear_mamba2": {"full": SMALL_SSM | {"levels": 5, "chunk_size": 4}},
    "mamba3": {
        "full": SMALL_SSM,
        "softplus": SMALL_SSM | {"rate": "softplus", "norm": True, "angles": 4},
    },
    "rwkv5": {"default": {"head_dim": 8}},
    "rwkv6": {"default": {"head_dim": 8, "shift_rank": 3, "decay_rank": 4}},
    "top1_element": {
        "hard": {},
        "soft": {"v_grad": "soft"},
        "gqa": {"kv_heads": 2},
        "conv": {"conv": True, "gate": True},
    },
}
# Variants nearly covered by others: they run as slow tests.
SLOW = {
    ("based_linear", "odd"),
    ("gated_deltaproduct", "three_steps"),
    ("kda", "bounded"),
    ("kda", "channel_gates"),
    ("gated_deltanet", "value_heads"),
    ("mla", "gated"),
    ("fox", "conv"),
    ("mamba1", "one"),
    ("mamba1", "one_dt"),
    ("mamba2", "one"),
    ("mamba3", "softplus"),
    ("nsa", "conv_gqa"),
    ("ttt_linear", "base"),
    ("parallax", "gqa"),
    ("wall", "gqa"),
    ("msa", "conv_gqa"),
    ("dsa", "conv_gqa"),
    ("rwkv7_shell", "bare"),
    ("rwkv7_shell", "full"),
    ("rwkv7_shell", "full_norm"),
    ("rwkv7_shell", "window_norm"),
    ("top1_chunk", "conv_approx_gqa"),
    ("top1_chunk", "gqa"),
    ("top1_chunk", "shortlist_gqa"),
    ("top1_chunk", "top_k"),
    ("top1_element", "conv"),
    ("transformer", "window"),
    ("transformer_pp", "alibi"),
    ("transformer_pp", "const_k"),
    ("transformer_pp", "conv_alibi"),
    ("transformer_pp", "gqa"),
    ("transformer_pp", "share_full_norm"),
    ("transformer_pp", "temperature"),
}
# One mixer of each kind. Tests that take seconds per mixer run on these; on the others they are slow tests.
REPRESENTATIVE = ("mamba2", "rwkv7", "top1_chunk", "transformer_pp")
IN_PATTERN_OF = {"based_conv": "based", "based_linear": "based", "post_norm_attention": "olmo_hybrid"}
CASES = [(name, variant) for name in mixers.names() for variant in VARIANTS.get(name, {"default": {}})]
FIRST = [(name, next(iter(VARIANTS.get(name, {"default": {}})))) for name in mixers.names()]


def is_first(mixer: str, variant: str, *_: Any) -> bool:
    """Return whether this is a mixer's first variant, which nearly covers the others."""
    return (mixer, variant) in FIRST


def represents(mixer: str, variant: str, *_: Any) -> bool:
    """Return whether this is the first variant of a `REPRESENTATIVE` mixer."""
    return mixer in REPRESENTATIVE and is_first(mixer, variant)


def slow_unless(quick: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Return test parameters (values or tuples), marked slow unless `quick(*case)` is true."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if quick(*case) else pytest.mark.slow) for case in cases]


def copy_tree(destination: Path) -> Path:
    """Copy the repository for tests that add files; lab and recorded benchmarks become links."""
    linked = ("lab", "benchmarks/results")  # pages link to these; tests may not open their files
    left_out = {str(ROOT / name) for name in (".git", ".venv", "build", "runs", *linked)}

    def ignored(directory: str, names: list[str]) -> set[str]:
        made = {name for name in names if name.endswith(("__pycache__", "_cache", ".egg-info", ".hypothesis"))}
        return made | {name for name in names if str(Path(directory, name)) in left_out}

    shutil.copytree(ROOT, destination, ignore=ignored)
    for name in linked:
        (destination / name).symlink_to(ROOT / name)
    return destination


def tiny(mixer: str, variant: str = "", **overrides: Any) -> Config:
    """Return the shipped config of `mixer` at test size; overrides are dotted keys with `__` for the dot.

    A mixer that only occurs in patterns of several mixers is used in all layers.
    """
    config = importlib.import_module(f"configs.{IN_PATTERN_OF.get(mixer, mixer)}").get_config("debug")
    if isinstance(config.model.mixer, tuple):
        with config.ignore_type():
            config.model.mixer = next(m for m in config.model.mixer if m["name"] == mixer)
    settings: dict[str, Any] = {
        "model.dim": 32,
        "model.n_layers": 2,
        "model.vocab_size": 48,
        "model.mlp.dim": 48,
        "model.loss_chunk": 32,
        "train.seq_len": 23,
        "train.batch_size": 2,
    }
    settings |= {f"model.mixer.{k}": v for k, v in {"heads": 4, "chunk_size": 4}.items() if k in config.model.mixer}
    settings |= {f"model.mixer.{k}": v for k, v in VARIANTS.get(mixer, {}).get(variant, {}).items()}
    settings |= {key.replace("__", "."): value for key, value in overrides.items()}
    with config.ignore_type():
        config.update_from_flattened_dict(settings)
    return from_config_dict(config)


def tiny_model(mixer: str, variant: str = "", **overrides: Any) -> Model:
    config = tiny(mixer, variant, **overrides)
    return Model(config.model, max_len=config.train.seq_len)


def random_tokens(shape: tuple[int, ...], vocab_size: int = 48, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab_size, shape, dtype=np.int32))


# ---------------------------------------------------------------------------------------------------------------- data
def write_blocks(directory: Path, *, seq_len: int = SEQ_LEN, seed: int = 0, n_train: int = 96) -> Path:
    """Write blocks as `seqjax.data.prepare` does: learnable bytes, with different words per domain.

    Every block is a document.
    """
    rng = np.random.default_rng(seed)
    splits: dict[str, dict[str, Any]] = {}
    lengths: dict[str, np.ndarray] = {}
    for split, count in (("train", n_train), ("validation", 12)):
        splits[split] = {}
        for i, domain in enumerate(DOMAINS):
            words = [bytes(rng.integers(97 + i, 110 + i, 3, dtype=np.uint8)) + b" " for _ in range(12)]
            text = b"".join(words[j] for j in rng.integers(0, len(words), count * seq_len))
            rows = np.frombuffer(text, np.uint8)[: count * (seq_len + 1)].reshape(count, -1).astype(np.uint16)
            path = f"{split}/{domain}-00000.array_record"
            digest, _ = blocks.write_records(directory / path, iter([rows]))
            file = {"path": path, "blocks": count, "sha256": digest, "bytes": (directory / path).stat().st_size}
            lengths[f"{split}/{domain}"] = np.full(count, seq_len + 1)
            splits[split][domain] = {"files": [file], "blocks": count, "tokens": rows.size, "bytes": rows.size}
    tokenizer = {"name": "byte", "sha256": ByteTokenizer.hash}
    manifest = {"format": manifests.FORMAT, "tokenizer": tokenizer, "block": seq_len + 1, "splits": splits}
    document_index.write(directory / document_index.FILE, lengths)
    write_json(directory / "manifest.json", manifest)
    return directory


# ---------------------------------------------------------------------------------------------------------------- runs
def run_settings(blocks_dir: Path, **overrides: Any) -> dict[str, Any]:
    """Return the settings, by dotted key, of a run on `blocks_dir` that takes seconds."""
    settings: dict[str, Any] = {
        "data.corpus": "blocks",
        "data.path": str(blocks_dir),
        "model.dim": 16,
        "model.n_layers": 2,
        "model.mlp.dim": 24,
        "train.seq_len": SEQ_LEN,
        "train.batch_size": 8,  # divisible by eight devices
        "train.steps": 60,
        "optim.warmup_steps": 3,
        "eval.every": 7 * 8 * SEQ_LEN,
        "eval.tokens": 10 * SEQ_LEN,
        "eval.classes": False,  # would compile another program
        "checkpoint.every": 5,
        "log.every": 1,
        "log.tensorboard": False,
        "log.sample_tokens": 0,
    }
    return settings | {key.replace("__", "."): value for key, value in overrides.items()}


def run_config(blocks_dir: Path, mixer: str = "top1_chunk", **overrides: Any) -> Config:
    config = importlib.import_module(f"configs.{mixer}").get_config("debug")
    with config.ignore_type():
        config.update_from_flattened_dict(run_settings(blocks_dir, **overrides))
    return from_config_dict(config)


def environment(*flags: str, optimised: bool = False) -> dict[str, str]:
    """Return the environment of a process with one CPU device.

    Programs compile fast, as in conftest.py, unless `optimised`, as for users.
    """
    fast = ("--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1")
    flags = flags if optimised else (*fast, *flags)
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


def command(blocks_dir: Path, workdir: Path, mixer: str = "top1_chunk", **overrides: Any) -> list[str]:
    """Return `python -m seqjax.main` with the settings of `run_settings`."""
    settings = run_settings(blocks_dir, **overrides)
    argument = ",".join(f"{key}={value}" for key, value in settings.items())
    return [
        sys.executable,
        "-m",
        "seqjax.main",
        f"--config={ROOT / 'configs' / mixer}.py:debug,{argument}",
        f"--workdir={workdir}",
    ]


def page_block(page: str, text: str) -> str:
    """Return the page's Python block that contains `text`."""
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S) if text in block]
    return block


def run(args: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; the caller checks the exit status."""
    options = {"env": environment(), "cwd": ROOT, "timeout": 300} | options
    return subprocess.run(args, capture_output=True, text=True, check=False, **options)


def interrupt(args: list[str], workdir: Path, *, at_row: int, number: int, delay: float = 0.0) -> tuple[int, str]:
    """Start a run and send signal `number` at `at_row` lines in `metrics.jsonl`; return exit status and stderr."""
    process = subprocess.Popen(args, env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 200
        while n_rows(workdir) < at_row and process.poll() is None:
            assert time.monotonic() < deadline, f"{workdir} has {n_rows(workdir)} rows, waited for {at_row}"
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode, stderr


def put(directory: Path, url: str) -> str:
    """Copy a directory to a store."""
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    store.in_threads(lambda name: store.write(f"{url}/{name}", (directory / name).read_bytes()), names)
    return url


# Metrics that depend on the clock and the device.
TIMING = ("tokens_per_s", "mfu", "seconds", "device_peak_gib")


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Return `metrics.jsonl` without timing metrics; equal runs give bitwise equal rows."""
    return [{k: v for k, v in row.items() if k not in TIMING} for row in metrics.read(workdir)]


def n_rows(workdir: Path) -> int:
    """Return the number of complete lines in a run that may still be running."""
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def checkpoint_steps(workdir: Path) -> list[int]:
    """Return the steps of the complete checkpoints."""
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


def bytes_held(tree: Any) -> set[int]:
    """Return the set of bytes per device of a tree of arrays; one number if all devices hold the same."""
    of_device: dict[int, int] = collections.Counter()
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            of_device[shard.device.id] += shard.data.nbytes
    return set(of_device.values())


def digest(tree: Any) -> str:
    """Return a sha256 over the bits of all arrays."""
    content = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        content.update(json.dumps(jax.tree_util.keystr(path)).encode() + np.asarray(leaf).tobytes())
    return content.hexdigest()


def fields(mixer: str) -> set[str]:
    """Return the setting names of a mixer."""
    return {field.name for field in dataclasses.fields(mixers.settings_class(mixer))}
