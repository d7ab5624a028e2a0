"""Models to measure: shipped configs by name, with settings after a colon.

For example `top1_chunk:model.mixer.selection=exact`.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import options
from seqjax.config import Config, from_config_dict, presets


def chosen(names: Sequence[str]) -> list[str]:
    """Return the checked configs of `--mixers`; all shipped configs if it is empty."""
    options.check_known("mixers", [name.partition(":")[0] for name in names], presets.names())
    return list(names) or presets.names()


def configured(name: str, size: str, *, batch: int, seq_len: int, remat: str = "none") -> Config:
    """Return the shipped config at `size` without gradient accumulation; a batch or length of 0 keeps the config's."""
    stem, _, settings = name.partition(":")
    config: Any = presets.read_config(f"{stem}:{','.join(filter(None, (size, settings)))}")
    config.train.accumulate = 1
    config.train.batch_size = batch or config.train.batch_size
    config.train.seq_len = seq_len or config.train.seq_len
    config.model.remat = remat
    return from_config_dict(config)


def label(name: str) -> str:
    """Return a short label: "top1_chunk approx" for `top1_chunk:model.mixer.selection=approx`; numbers keep keys."""
    stem, _, settings = name.partition(":")
    words = [stem]
    for key, _, value in (part.rpartition(".")[2].partition("=") for part in options.words(settings)):
        words.append(f"{key}={value}" if value.isdigit() else value)
    return " ".join(words)
