"""Llama, Mistral and GPT-2 under the names of transformers, as written by its `save_pretrained`."""

from typing import Any

from seqjax.config import Config
from seqjax.convert.rules import (
    MISSING,
    PLAIN,
    Family,
    Rule,
    Setting,
    embed_and_head,
    export_only,
    fixed,
    fixed_label,
    key,
    linear,
    mlp_dim,
    norm,
    sizes,
)
from seqjax.utils import UserError

# MLP kind and tanh form -> hidden_act
GATES = {("swiglu", False): "silu", ("geglu", False): "gelu", ("geglu", True): "gelu_pytorch_tanh"}
ORDINARY: dict[str, tuple[Any, ...]] = {
    **PLAIN,
    "model.mixer.qk_norm": (False,),
    "model.mixer.conv": (False,),
    "model.mixer.const": ("none",),
    "model.mixer.temperature": (None,),
}


# ------------------------------------------------------------------------------------------------------ Llama, Mistral
def _gate(config: Config) -> str:
    mlp = config.model.mlp
    return GATES.get((mlp.kind, mlp.kind == "geglu" and mlp.approximate_gelu), mlp.kind)


def _gate_fix(value: Any, found: dict[str, Any]) -> str:
    for (kind, tanh), name in GATES.items():
        if name == value:
            return f"model.mlp.kind={kind}" + f",model.mlp.approximate_gelu={tanh}" * (kind == "geglu")
    return ""


def _rope(found: dict[str, Any]) -> Any:
    """Return the RoPE base, or the kind of RoPE scaling if there is one, which is not supported."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", found.get("partial_rotary_factor"))
    if kind != "default":
        return f"scaled ({kind})"
    if share not in (None, 1):
        return f"of {share} of the head"
    if any(isinstance(value, dict) for value in rope.values()):
        return "one per kind of layer"
    return rope.get("rope_theta", found.get("rope_theta", 1e4))


def _rope_fix(value: Any, found: dict[str, Any]) -> str:
    return "" if isinstance(value, str) else f"model.mixer.rope_base={float(value)}"


def _llama_label(config: Config) -> tuple[str, str]:
    if config.model.mixer.window is None:
        return "llama", "LlamaForCausalLM"
    if config.model.mixer.bias or config.model.mlp.bias:
        raise UserError(
            "A Llama with a window is a Mistral, which has no biases: set config.model.mixer.bias and "
            "config.model.mlp.bias to False, or config.model.mixer.window to None."
        )
    return "mistral", "MistralForCausalLM"


def _kv_heads(config: Config) -> int:
    return config.model.mixer.kv_heads or config.model.mixer.heads


def _head_dim(config: Config) -> int:
    return config.model.mixer.head_dim or config.model.dim // config.model.mixer.heads


LLAMA = Family(
    name="Llama",
    prefix="model.",
    types=("llama", "mistral"),
    label=_llama_label,
    embed="model.embed_tokens.weight",
    rules=(
        *embed_and_head("model.embed_tokens", "model.norm"),
        *norm("model.layers.{}.input_layernorm", "norm1"),
        *linear("model.layers.{}.self_attn.q_proj", "mixer.q"),
        *linear("model.layers.{}.self_attn.k_proj", "mixer.k"),
        *linear("model.layers.{}.self_attn.v_proj", "mixer.v"),
        *linear("model.layers.{}.self_attn.o_proj", "mixer.out"),
        *norm("model.layers.{}.post_attention_layernorm", "norm2"),
        *linear("model.layers.{}.mlp.gate_proj", "mlp.gate"),
        *linear("model.layers.{}.mlp.up_proj", "mlp.up"),
        *linear("model.layers.{}.mlp.down_proj", "mlp.down"),
    ),
    settings=(
        *sizes(tie=False),
        key("num_attention_heads", "model.mixer.heads"),
        key("num_key_value_heads", "model.mixer.kv_heads", _kv_heads),
        key("head_dim", "model.mixer.head_dim", _head_dim),
        mlp_dim("intermediate_size", lambda found: MISSING),
        key("rms_norm_eps", "model.norm_eps", default=1e-6),
        key("attention_bias", "model.mixer.bias", default=False),
        key("mlp_bias", "model.mlp.bias", default=False),
        Setting("hidden_act", _gate, lambda found: found.get("hidden_act", "silu"), _gate_fix),
        Setting("rope_theta", lambda config: config.model.mixer.rope_base, _rope, _rope_fix),
        Setting(
            "sliding_window",
            lambda config: config.model.mixer.window,
            lambda found: found.get("sliding_window", 4096) if found.get("model_type") == "mistral" else None,
            lambda value, found: f"model.mixer.window={value}",
        ),
        export_only("max_position_embeddings", lambda config: config.train.seq_len),
    ),
    needs={**ORDINARY, "model.mixer.position": ("rope",), "model.mlp.kind": ("swiglu", "geglu")},
    redundant=r"rotary_emb\.inv_freq$",
)


# --------------------------------------------------------------------------------------------------------------- GPT-2
def _gpt2_linear(public: str, ours: str) -> tuple[Rule, ...]:
    """Return the rules of GPT-2's own Conv1D, whose weight is [in, out] as here."""
    return tuple(rule._replace(form="same") for rule in linear(public, ours))


def _gelu(found: dict[str, Any]) -> str:
    activation = found.get("activation_function", "gelu_new")
    return "gelu_new" if activation == "gelu_pytorch_tanh" else activation


def _gelu_fix(value: Any, found: dict[str, Any]) -> str:
    return f"model.mlp.approximate_gelu={value == 'gelu_new'}" if value in ("gelu", "gelu_new") else ""


GPT2 = Family(
    name="GPT-2",
    prefix="transformer.",
    types=("gpt2",),
    label=fixed_label("gpt2", "GPT2LMHeadModel"),
    embed="transformer.wte.weight",
    rules=(
        *embed_and_head("transformer.wte", "transformer.ln_f"),
        Rule("transformer.wpe.weight", "positions"),
        *norm("transformer.h.{}.ln_1", "norm1"),
        *_gpt2_linear("transformer.h.{}.attn.c_attn", "mixer.q mixer.k mixer.v"),
        *_gpt2_linear("transformer.h.{}.attn.c_proj", "mixer.out"),
        *norm("transformer.h.{}.ln_2", "norm2"),
        *_gpt2_linear("transformer.h.{}.mlp.c_fc", "mlp.up"),
        *_gpt2_linear("transformer.h.{}.mlp.c_proj", "mlp.down"),
    ),
    settings=(
        *sizes(tie=True, dim="n_embd", layers="n_layer"),
        key("n_positions", "train.seq_len"),
        key("n_head", "model.mixer.heads"),
        mlp_dim("n_inner", lambda found: 4 * found["n_embd"]),
        key("layer_norm_epsilon", "model.norm_eps", default=1e-5),
        Setting(
            "activation_function",
            lambda config: "gelu_new" if config.model.mlp.approximate_gelu else "gelu",
            _gelu,
            _gelu_fix,
        ),
        fixed("scale_attn_weights", True, default=True),
        fixed("scale_attn_by_inverse_layer_idx", False, default=False),
        fixed("add_cross_attention", False, default=False),
    ),
    needs={
        **ORDINARY,
        "model.norm": ("layernorm",),
        "model.learned_positions": (True,),
        "model.mlp.kind": ("gelu",),
        "model.mlp.bias": (True,),
        "model.mixer.bias": (True,),
        "model.mixer.position": ("none",),
        "model.mixer.kv_heads": (None,),
        "model.mixer.head_dim": (None,),
        "model.mixer.window": (None,),
    },
    redundant=r"\.h\.\d+\.attn\.(masked_)?bias$",  # the causal mask
)
