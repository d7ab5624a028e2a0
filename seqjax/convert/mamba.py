"""Mamba and Mamba-2 under transformers' names, as `save_pretrained` writes them.

The original files of state-spaces/mamba use other names and are pickled; the `-hf` conversions use these names.
"""

import math
from typing import Any

from seqjax.config import Config
from seqjax.convert.rules import (
    PLAIN,
    SIZE,
    Family,
    Rule,
    Setting,
    conv,
    embed_and_head,
    export_only,
    fixed,
    fixed_label,
    key,
    linear,
    no_fix,
    norm,
    sizes,
)


def _dt_rank(config: Config) -> int:
    return config.model.mixer.dt_rank or -(-config.model.dim // 16)


def _residual(value: Any, hf_config: dict[str, Any]) -> dict[str, Any]:
    return {"model.residual_dtype": "float32" if value else "compute"}


def _time_step_limit(hf_config: dict[str, Any]) -> Any:
    """Return None if step sizes are not clamped; newer files write infinity as {"__float__": "Infinity"}."""
    limit = hf_config.get("time_step_limit") or [0.0, math.inf]
    if not isinstance(limit, list) or len(limit) != 2:
        return limit
    low, high = limit
    return None if low == 0 and high in (math.inf, "Infinity", {"__float__": "Infinity"}) else [low, high]


def _time_step_rank(hf_config: dict[str, Any]) -> Any:
    rank = hf_config.get("time_step_rank", "auto")
    return -(-hf_config["hidden_size"] // 16) if rank == "auto" else rank


SSM = (
    key("expand", "model.mixer.expand", default=2),
    key("conv_kernel", "model.mixer.conv_width", default=4),
    key("layer_norm_epsilon", "model.norm_eps", default=1e-5, form=float),
    Setting(
        "residual_in_fp32",
        lambda config: config.model.residual_dtype == "float32",
        lambda hf_config: hf_config.get("residual_in_fp32", True),
        _residual,
        bool,
    ),
    fixed("hidden_act", "silu", "swish", default="silu"),
    fixed("use_bias", False, default=False),
    fixed("use_conv_bias", True, default=True),
)
SSM_NEEDS = {**PLAIN, "model.mlp.kind": ("none",), "model.mixer.decay": ("full",), "model.mixer.conv": (True,)}

MAMBA = Family(
    name="Mamba",
    prefix="backbone.",
    types=("mamba",),
    label=fixed_label("mamba", "MambaForCausalLM"),
    embed="backbone.embeddings.weight",
    rules=(
        *embed_and_head("backbone.embeddings", "backbone.norm_f"),
        *norm("backbone.layers.{}.norm", "norm1"),
        *linear("backbone.layers.{}.mixer.in_proj", "mixer.x mixer.z"),
        *conv("backbone.layers.{}.mixer.conv1d", "mixer.conv"),
        *linear("backbone.layers.{}.mixer.x_proj", "mixer.delta mixer.bc"),
        *linear("backbone.layers.{}.mixer.dt_proj", "mixer.dt"),
        Rule("backbone.layers.{}.mixer.dt_proj.bias", "mixer.dt_bias"),
        Rule("backbone.layers.{}.mixer.A_log", "mixer.a_log"),
        Rule("backbone.layers.{}.mixer.D", "mixer.skip"),
        *linear("backbone.layers.{}.mixer.out_proj", "mixer.out"),
    ),
    settings=(
        *sizes(tie=True),
        key("time_step_rank", "model.mixer.dt_rank", _dt_rank, form=(SIZE, "auto"))._replace(read=_time_step_rank),
        key("state_size", "model.mixer.state", default=16),
        *SSM,
    ),
    needs=SSM_NEEDS,
)

MAMBA2 = Family(
    name="Mamba-2",
    prefix="backbone.",
    types=("mamba2",),
    label=fixed_label("mamba2", "Mamba2ForCausalLM"),
    embed="backbone.embeddings.weight",
    rules=(
        *embed_and_head("backbone.embeddings", "backbone.norm_f"),
        *norm("backbone.layers.{}.norm", "norm1"),
        *linear("backbone.layers.{}.mixer.in_proj", "mixer.z mixer.x mixer.bc mixer.dt"),
        *conv("backbone.layers.{}.mixer.conv1d", "mixer.conv_x mixer.conv_bc"),
        Rule("backbone.layers.{}.mixer.dt_bias", "mixer.dt_bias"),
        Rule("backbone.layers.{}.mixer.A_log", "mixer.a_log"),
        Rule("backbone.layers.{}.mixer.D", "mixer.skip"),
        *norm("backbone.layers.{}.mixer.norm", "mixer.norm"),
        *linear("backbone.layers.{}.mixer.out_proj", "mixer.out"),
    ),
    settings=(
        *sizes(tie=False),
        key("head_dim", "model.mixer.head_dim", default=64),
        key("state_size", "model.mixer.state", default=128),
        export_only(
            "num_heads", lambda config: config.model.mixer.expand * config.model.dim // config.model.mixer.head_dim
        ),
        *SSM,
        fixed("layer_norm_epsilon", 1e-5),  # the inner norm shares this eps, and it has no setting here
        fixed("n_groups", 1, default=8),
        Setting("time_step_limit", lambda config: None, _time_step_limit, no_fix),
    ),
    needs={**SSM_NEEDS, "model.mixer.norm": (True,), "model.mixer.gate": (True,)},
)
