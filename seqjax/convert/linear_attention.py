"""RWKV-7, DeltaNet and Gated DeltaNet under the names of flash-linear-attention (fla-core 0.6).

BlinkDL's original RWKV-7 files use other names and are pickled; fla's conversions use these names.
"""

import math
from collections.abc import Callable
from typing import Any

from seqjax import mixers
from seqjax.config import Config
from seqjax.convert.rules import (
    MISSING,
    PLAIN,
    SIZE,
    Family,
    Fix,
    Rule,
    Setting,
    conv,
    embed_and_head,
    export_only,
    fixed,
    fixed_label,
    key,
    linear,
    mlp_dim,
    no_fix,
    norm,
    sizes,
)
from seqjax.errors import UserError
from seqjax.mixers.rwkv7 import lora_ranks


# -------------------------------------------------------------------------------------------------------------- RWKV-7
def _lora(name: str, *, first: bool = True) -> tuple[Rule, ...]:
    public = f"model.layers.{{}}.attn.{name}_lora.lora"
    rules = (
        Rule(f"{public}.0.weight", f"mixer.{name}_lora.a", "linear", first),
        Rule(f"{public}.2.weight", f"mixer.{name}_lora.b", "linear", first),
    )
    return rules if name == "g" else (*rules, Rule(f"{public}.2.bias", f"mixer.{name}_lora.bias", "same", first))


def _rank(public: str, ours: str, index: int, *, default: int) -> Setting:
    def ours_of(config: Config) -> int:
        mixer, names = config.model.mixer, ("decay_rank", "eta_rank", "value_rank", "gate_rank")
        return lora_ranks(config.model.dim, **{name: getattr(mixer, name) for name in names})[index]

    return key(public, ours, ours_of, default=default)


def _head_dim(config: Config) -> int:
    return config.model.dim // config.model.mixer.heads


def _hf_head_dim(hf_config: dict[str, Any]) -> int:
    """Return fla's head width; 64 if the file states neither the width nor the number of heads."""
    heads = hf_config.get("num_heads")
    return hf_config.get("head_dim") or (hf_config["hidden_size"] // heads if heads else 64)


def _value_dim(hf_config: dict[str, Any]) -> Any:
    """Return None if all layers' values have the model's width, otherwise the stated widths."""
    value_dim = hf_config.get("value_dim")
    model_wide = (None, hf_config["hidden_size"], [hf_config["hidden_size"]] * hf_config["num_hidden_layers"])
    return None if value_dim in model_wide else value_dim


def _rounded(hf_config: dict[str, Any], share: float, multiple: int) -> int:
    """Return fla's inner width for a null `intermediate_size`."""
    width = int(hf_config["hidden_size"] * (hf_config.get("hidden_ratio") or 4) * share)
    return multiple * -(-width // multiple)


def _head_eps(hf_config: dict[str, Any]) -> Any:
    """Return MISSING if fla's head norm eps, head_dim * norm_eps, is 64e-5, the only value here."""
    eps, width = hf_config.get("norm_eps") or 1e-5, _hf_head_dim(hf_config)
    return MISSING if math.isclose(eps * width, 64e-5) else f"{eps} over heads of {width}"


def _rwkv7_label(config: Config) -> tuple[str, str]:
    eps = 64e-5 / _head_dim(config)
    if not math.isclose(config.model.norm_eps, eps):
        raise UserError(
            f"fla's RWKV-7 ties the eps of its norms: with heads of {_head_dim(config)} it is {eps:.3g}, not "
            f"config.model.norm_eps={config.model.norm_eps}. Train with --config.model.norm_eps={eps:.3g} to export "
            "the run."
        )
    return "rwkv7", "RWKV7ForCausalLM"


RWKV7 = Family(
    name="RWKV-7",
    prefix="model.",
    types=("rwkv7",),
    label=_rwkv7_label,
    embed="model.embeddings.weight",
    rules=(
        *embed_and_head("model.embeddings", "model.norm"),
        *norm("model.layers.0.pre_norm", "embed_norm"),
        *norm("model.layers.{}.attn_norm", "norm1"),
        *(Rule(f"model.layers.{{}}.attn.x_{name}", f"mixer.mu.{name}", "row") for name in "rwkvag"),
        *(rule for name in "rkv" for rule in linear(f"model.layers.{{}}.attn.{name}_proj", f"mixer.{name}")),
        *linear("model.layers.{}.attn.o_proj", "mixer.out"),
        *(rule for name in "wag" for rule in _lora(name)),
        *_lora("v", first=False),
        Rule("model.layers.{}.attn.k_k", "mixer.k_k"),
        Rule("model.layers.{}.attn.k_a", "mixer.k_a"),
        Rule("model.layers.{}.attn.r_k", "mixer.r_k", "heads"),
        *norm("model.layers.{}.attn.g_norm", "mixer.norm"),
        *norm("model.layers.{}.ffn_norm", "norm2"),
        Rule("model.layers.{}.ffn.x_k", "mlp.mu_k"),
        *linear("model.layers.{}.ffn.key", "mlp.k"),
        *linear("model.layers.{}.ffn.value", "mlp.v"),
    ),
    settings=(
        *sizes(tie=False),
        Setting(
            "head_dim",
            _head_dim,
            _hf_head_dim,
            lambda value, hf_config: {"model.mixer.heads": hf_config["hidden_size"] // value},
            SIZE,
            derived=True,
        ),
        mlp_dim("intermediate_size", lambda hf_config: _rounded(hf_config, 1, 32))._replace(
            get=lambda config: config.model.mlp.dim or 4 * config.model.dim
        ),
        _rank("decay_low_rank_dim", "model.mixer.decay_rank", 0, default=64),
        _rank("a_low_rank_dim", "model.mixer.eta_rank", 1, default=64),
        _rank("v_low_rank_dim", "model.mixer.value_rank", 2, default=16),
        _rank("gate_low_rank_dim", "model.mixer.gate_rank", 3, default=128),
        key("norm_eps", "model.norm_eps", default=1e-5, form=float),
        Setting("norm_eps", lambda config: config.model.norm_eps, _head_eps, no_fix, float),
        export_only("fuse_norm", lambda config: False),  # Fused, fla's unit vectors use another eps than the RWKV code.
        fixed("hidden_act", "sqrelu", default="sqrelu"),
        fixed("norm_first", True, default=True),
        fixed("norm_bias", True, default=True),
        export_only("max_position_embeddings", lambda config: config.train.seq_len),
        fixed("attn", None, default=None),
        Setting("value_dim", lambda config: None, _value_dim, no_fix),
    ),
    needs={**PLAIN, "model.norm": ("layernorm",), "model.embed_norm": (True,)},
)


# -------------------------------------------------------------------------------------------- DeltaNet, Gated DeltaNet
def _delta(*gates: Rule) -> tuple[Rule, ...]:
    names = {"q": "q", "k": "k", "v": "v", "b": "beta", "o": "out"}
    return (
        *embed_and_head("model.embeddings", "model.norm"),
        *norm("model.layers.{}.attn_norm", "norm1"),
        *(rule for a, b in names.items() for rule in linear(f"model.layers.{{}}.attn.{a}_proj", f"mixer.{b}")),
        *(rule for a in "qkv" for rule in conv(f"model.layers.{{}}.attn.{a}_conv1d", f"mixer.{a}_conv")),
        *gates,
        *norm("model.layers.{}.attn.o_norm", "mixer.norm"),
        *norm("model.layers.{}.mlp_norm", "norm2"),
        *(rule for a in ("gate", "up", "down") for rule in linear(f"model.layers.{{}}.mlp.{a}_proj", f"mlp.{a}")),
    )


def _width(which: int) -> Callable[[Config], int]:
    """Return a function that maps a config to the total key width (0) or value width (1)."""

    def of(config: Config) -> int:
        mixer = config.model.mixer
        mixer_class: Any = mixers.load(mixer.name)
        return mixer_class.widths(config.model.dim, mixer.key_dim, mixer.value_dim)[which]

    return of


def _share(public: str, default: float, get: Callable[[Config], Any], fix: Fix, *, form: Any = float) -> Setting:
    def read(hf_config: dict[str, Any]) -> Any:
        return default if hf_config.get(public) is None else hf_config[public]

    return Setting(public, get, read, fix, form, derived=True)


def _value_dim_fix(value: Any, hf_config: dict[str, Any]) -> dict[str, Any]:
    return {"model.mixer.value_dim": round(value * (hf_config.get("head_dim") or 256) * hf_config["num_heads"])}


KEYS, VALUES = _width(0), _width(1)
DELTA = (
    *sizes(tie=False),
    key("num_heads", "model.mixer.heads"),
    key("conv_size", "model.mixer.conv_width", default=4),
    mlp_dim("intermediate_size", lambda hf_config: _rounded(hf_config, 2 / 3, 256)),
    key("norm_eps", "model.norm_eps", default=1e-6, form=float),
    key("norm_eps", "model.mixer.norm_eps", default=1e-6, form=float),
    fixed("hidden_act", "swish", "silu", default="swish"),
    fixed("use_short_conv", True, default=True),
    fixed("allow_neg_eigval", False, default=False),
    fixed("attn", None, default=None),
    fixed("attnres_block_size", None, default=None),
    export_only("max_position_embeddings", lambda config: config.train.seq_len),
)
DELTA_NEEDS = {**PLAIN, "model.mlp.kind": ("swiglu",), "model.mlp.bias": (False,), "model.mixer.conv": (True,)}

DELTANET = Family(
    name="DeltaNet",
    prefix="model.",
    types=("delta_net",),
    label=fixed_label("delta_net", "DeltaNetForCausalLM"),
    embed="model.embeddings.weight",
    rules=_delta(),
    settings=(
        *DELTA,
        _share(
            "expand_k",
            1.0,
            lambda config: KEYS(config) / config.model.dim,
            lambda value, hf_config: {"model.mixer.key_dim": round(value * hf_config["hidden_size"])},
        ),
        _share(
            "expand_v",
            1.0,
            lambda config: VALUES(config) / config.model.dim,
            lambda value, hf_config: {"model.mixer.value_dim": round(value * hf_config["hidden_size"])},
        ),
        fixed("use_gate", False, default=False),
        fixed("use_beta", True, default=True),
        fixed("use_output_norm", True, default=True),
        fixed("qk_norm", "l2", default="l2"),
        fixed("qk_activation", "silu", default="silu"),
    ),
    needs=DELTA_NEEDS,
)

GATED_DELTANET = Family(
    name="Gated DeltaNet",
    prefix="model.",
    types=("gated_deltanet",),
    label=fixed_label("gated_deltanet", "GatedDeltaNetForCausalLM"),
    embed="model.embeddings.weight",
    rules=_delta(
        *linear("model.layers.{}.attn.a_proj", "mixer.decay"),
        *linear("model.layers.{}.attn.g_proj", "mixer.gate"),
        Rule("model.layers.{}.attn.A_log", "mixer.log_rate_H"),
        Rule("model.layers.{}.attn.dt_bias", "mixer.step_bias_H"),
    ),
    settings=(
        *DELTA,
        _share(
            "head_dim",
            256,
            lambda config: KEYS(config) // config.model.mixer.heads,
            lambda value, hf_config: {"model.mixer.key_dim": value * hf_config["num_heads"]},
            form=SIZE,
        ),
        _share(
            "expand_v",
            2.0,
            lambda config: VALUES(config) / KEYS(config),
            _value_dim_fix,
        ),
        Setting(
            "num_v_heads",
            lambda config: None,
            lambda hf_config: (
                None if hf_config.get("num_v_heads") == hf_config["num_heads"] else hf_config.get("num_v_heads")
            ),
            no_fix,
        ),
        fixed("use_gate", True, default=True),
        fixed("output_gate_activation", "swish", "silu", default="swish"),
    ),
    needs={**DELTA_NEEDS, "model.mixer.gate": (True,), "model.mixer.value_heads": (None,)},
)
