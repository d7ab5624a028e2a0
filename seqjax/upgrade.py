"""Reads the settings that earlier versions of seqjax wrote to `config.json`.

Parameters in checkpoints are where they always were: no version has moved one. A `config.json` without a `version` is
of version 1. Later versions changed:

    2   None means "not set", where 0 did; `model.mixer` is one group or a list of them, where there was `model.pattern`
        beside it; `position` none alone means no rotation, where `rope_base` 0 did too; the parts of RWKV-7's shell and
        the size of the chunk that its Top-1 selects have new names
    3   `train.accumulate` is None where the number of micro-batches follows from `train.per_device_batch_size` and the
        devices; it was 1 by default, and nothing limited the sequences per device
"""

import copy
from typing import Any

from seqjax.errors import UserError

VERSION = 3

# Keys of earlier versions and their current names, for messages about an unknown key.
RENAMED = {
    "model.pattern": "model.mixer, a tuple of groups,",
    "model.mixer.select_chunk": "model.mixer.chunk_size",
    "model.mixer.shell.shift": "model.mixer.token_shift",
    "model.mixer.shell.vres": "model.mixer.value_residual",
    "model.mixer.shell.gate": "model.mixer.gate",
    "model.mixer.shell.lnx": "model.mixer.head_norm",
}
SHELL = {"shift": "token_shift", "vres": "value_residual", "gate": "gate", "lnx": "head_norm"}

# Settings whose 0 became None in version 2, by group and by the name of the mixer.
ZERO_WAS_NONE = {
    ("model", "mlp"): ("dim",),
    ("optim",): ("clip_norm",),
    ("eval",): ("batch_size",),
    ("log",): ("profile_start",),
}
ATTENTION = ("kv_heads", "head_dim")
MIXER_ZERO_WAS_NONE = {
    "transformer": (*ATTENTION, "window", "temperature"),
    "transformer_pp": (*ATTENTION, "window", "temperature"),
    "top1_chunk": ATTENTION,
    "top1_element": ATTENTION,
    "deltanet": ("key_dim", "value_dim"),
    "gated_deltanet": ("key_dim", "value_dim"),
    "mamba1": ("dt_rank", "chunk_size"),
    "rwkv7": ("decay_rank", "eta_rank", "value_rank", "gate_rank"),
    "rwkv7_shell": ("value_rank", "gate_rank"),
}
ROTATING = ("transformer", "transformer_pp", "top1_chunk", "top1_element", "rwkv7_shell")


def upgrade_config(values: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return the content of a `config.json` of any version as current settings, without its `version`.

    `where` names the file in the `UserError` for a version that is newer than this seqjax.
    """
    values = copy.deepcopy(values)
    version = version_of(values, where=where)
    if version < 2:
        _to_2(values)
    if version < 3:
        _to_3(values)
    values.pop("version", None)
    return values


def version_of(values: dict[str, Any], *, where: str) -> int:
    """Return the version of a `config.json`; raise `UserError` if it is invalid or later than this seqjax."""
    version = values.get("version", 1)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UserError(f"{where}: version {version!r} is no number from 1 to {VERSION}; restore the file.")
    if version > VERSION:
        raise UserError(
            f"{where} was written by a later seqjax: its version is {version}, this one knows versions up to "
            f"{VERSION}. Update seqjax to read it."
        )
    return version


def _to_2(values: dict[str, Any]) -> None:
    for path, names in ZERO_WAS_NONE.items():
        group: Any = values
        for key in path:
            group = group.get(key) if isinstance(group, dict) else None
        _zero_to_none(group, names)
    model = values.get("model")
    if not isinstance(model, dict):
        return
    pattern = model.pop("pattern", None)
    if pattern:  # it took precedence over the mixer beside it
        model["mixer"] = list(pattern)
    mixer = model.get("mixer")
    for group in mixer if isinstance(mixer, list) else [mixer]:
        if isinstance(group, dict):
            _mixer_to_2(group)


def _to_3(values: dict[str, Any]) -> None:
    train = values.get("train")
    if isinstance(train, dict) and train.get("accumulate") == 1:
        train["accumulate"] = None


def _mixer_to_2(mixer: dict[str, Any]) -> None:
    name = mixer.get("name")
    _zero_to_none(mixer, MIXER_ZERO_WAS_NONE.get(str(name), ()))
    if name in ROTATING and mixer.get("rope_base") == 0:
        if mixer.get("position", "rope") == "rope":
            mixer["position"] = "none"
        mixer["rope_base"] = 10_000.0  # not used
    if name == "rwkv7_shell":
        if "select_chunk" in mixer:
            mixer["chunk_size"] = mixer.pop("select_chunk")
        parts: dict[str, Any] = mixer.pop("shell", {})
        mixer |= {SHELL.get(part, part): kept for part, kept in parts.items()}


def _zero_to_none(group: Any, names: tuple[str, ...]) -> None:
    if isinstance(group, dict):
        for name in names:
            if group.get(name) == 0:
                group[name] = None
