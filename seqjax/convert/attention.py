"""Llama, Mistral, Qwen2, Qwen3 and GPT-2 under transformers' names, as `save_pretrained` writes them.

Qwen2 adds biases to q, k and v. Qwen3 instead applies a per-head RMSNorm to q and k before RoPE (same eps).
"""

from typing import Any

from seqjax.config import Config
from seqjax.convert.rules import (
    MISSING,
    PLAIN,
    ROPE,
    SIZE,
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
from seqjax.errors import UserError

# MLP kind and tanh form -> hidden_act
GATES = {("swiglu", False): "silu", ("geglu", False): "gelu", ("geglu", True): "gelu_pytorch_tanh"}
# rope_scaling type -> its numbers: public key and our setting
SCALINGS: dict[str, dict[str, str]] = {
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_len",
    },
}
ORDINARY: dict[str, tuple[Any, ...]] = {
    **PLAIN,
    "model.mixer.rope_share": (1.0,),
    "model.mixer.qk_norm": (False,),
    "model.mixer.qkv_bias": (None,),
    "model.mixer.conv": (False,),
    "model.mixer.gate": (False,),
    "model.mixer.const": ("none",),
    "model.mixer.temperature": (None,),
}


# ---------------------------------------------------------------------------------------------- Llama, Mistral and Qwen
def _gate(config: Config) -> str:
    mlp = config.model.mlp
    return GATES.get((mlp.kind, mlp.kind == "geglu" and mlp.approximate_gelu), mlp.kind)


def _gate_fix(value: Any, hf_config: dict[str, Any]) -> dict[str, Any]:
    for (kind, tanh), name in GATES.items():
        if name == value:
            return {"model.mlp.kind": kind} | ({"model.mlp.approximate_gelu": tanh} if kind == "geglu" else {})
    return {}


def _rope(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return the group of RoPE settings: `rope_scaling` or, since transformers 5, `rope_parameters`, in this order."""
    return hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}


def _rope_theta(hf_config: dict[str, Any]) -> Any:
    """Return the RoPE base, or text that names an unsupported feature: partial rotary, or one base per layer type."""
    rope = _rope(hf_config)
    share = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if share not in (None, 1):
        return f"partial_rotary_factor={share}"
    if any(isinstance(value, dict) for value in rope.values()):
        return "one base per layer type"
    return next((base for base in (rope.get("rope_theta"), hf_config.get("rope_theta")) if base is not None), 1e4)


def _rope_fix(value: Any, hf_config: dict[str, Any]) -> dict[str, Any]:
    return {} if isinstance(value, str) else {"model.mixer.rope_base": float(value)}


def _our_scaling(config: Config) -> dict[str, Any] | None:
    mixer = config.model.mixer
    if mixer.rope_scaling == "none":
        return None
    values = {public: getattr(mixer, ours) for public, ours in SCALINGS[mixer.rope_scaling].items()}
    return {"rope_type": mixer.rope_scaling, **values}


def _scaling(hf_config: dict[str, Any]) -> dict[str, Any] | str | None:
    """Return the RoPE scaling settings, None without scaling, or the name of an unsupported type."""
    rope = _rope(hf_config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in SCALINGS:
        return None if kind == "default" else kind
    name = "original_max_position_embeddings"  # transformers searches in the following order
    length = hf_config.get(name) or rope.get(name) or hf_config.get("max_position_embeddings")
    stated = {public: value for public, value in {**rope, name: length}.items() if value is not None}
    return {"rope_type": kind, **{public: stated[public] for public in SCALINGS[kind]}}


def _scaling_fix(value: Any, hf_config: dict[str, Any]) -> dict[str, Any]:
    if isinstance(value, str):
        return {}
    kind = value["rope_type"] if value else "none"
    numbers = {f"model.mixer.{ours}": value[public] for public, ours in SCALINGS.get(kind, {}).items()}
    return {"model.mixer.rope_scaling": kind, **numbers}


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


def _window(config: Config) -> int | None:
    return config.model.mixer.window


def _window_fix(value: Any, hf_config: dict[str, Any]) -> dict[str, Any]:
    return {} if isinstance(value, str) else {"model.mixer.window": value}


def _qwen_window(hf_config: dict[str, Any]) -> int | str | None:
    """Return the window of all layers, None without windows, or text if only some layers have one (unsupported)."""
    width = hf_config.get("sliding_window", 4096) if hf_config.get("use_sliding_window") else None
    n_layers, first = hf_config["num_hidden_layers"], hf_config.get("max_window_layers", 28)
    later = "full_attention" if width is None else "sliding_attention"
    kinds = hf_config.get("layer_types") or ["full_attention" if i < first else later for i in range(n_layers)]
    if set(kinds) == {"full_attention"}:
        return None
    if width is not None and set(kinds) == {"sliding_attention"}:
        return width
    return f"{width} in {sum(kind != 'full_attention' for kind in kinds)} of {len(kinds)} layers"


KV_HEADS = key("num_key_value_heads", "model.mixer.kv_heads", _kv_heads)
ATTENTION_BIAS = key("attention_bias", "model.mixer.bias", default=False, form=bool)
DECODER = (
    *sizes(tie=False),
    key("num_attention_heads", "model.mixer.heads"),
    mlp_dim("intermediate_size", lambda hf_config: MISSING),
    key("rms_norm_eps", "model.norm_eps", default=1e-6, form=float),
    Setting("hidden_act", _gate, lambda hf_config: hf_config.get("hidden_act", "silu"), _gate_fix, str),
    Setting("rope_theta", lambda config: config.model.mixer.rope_base, _rope_theta, _rope_fix, float),
    Setting("rope_scaling", _our_scaling, _scaling, _scaling_fix, ROPE),
    export_only("max_position_embeddings", lambda config: config.train.seq_len),
)
DECODER_NEEDS = {**ORDINARY, "model.mixer.position": ("rope",), "model.mlp.kind": ("swiglu", "geglu")}

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
        *norm("model.layers.{}.self_attn.q_norm", "mixer.q_norm"),
        *norm("model.layers.{}.self_attn.k_norm", "mixer.k_norm"),
        *norm("model.layers.{}.post_attention_layernorm", "norm2"),
        *linear("model.layers.{}.mlp.gate_proj", "mlp.gate"),
        *linear("model.layers.{}.mlp.up_proj", "mlp.up"),
        *linear("model.layers.{}.mlp.down_proj", "mlp.down"),
    ),
    settings=(
        *DECODER,
        KV_HEADS,
        key("head_dim", "model.mixer.head_dim", _head_dim),
        ATTENTION_BIAS,
        key("mlp_bias", "model.mlp.bias", default=False, form=bool),
        Setting(
            "sliding_window",
            _window,
            lambda hf_config: (
                hf_config.get("sliding_window", 4096) if hf_config.get("model_type") == "mistral" else None
            ),
            _window_fix,
            SIZE,
        ),
    ),
    needs=DECODER_NEEDS,
    redundant=r"rotary_emb\.inv_freq$",
)
QWEN = (
    *DECODER,
    # Null means the number of heads; a file without the key has the public class's default.
    KV_HEADS._replace(
        read=lambda hf_config: hf_config.get("num_key_value_heads", 32) or hf_config["num_attention_heads"]
    ),
    Setting("sliding_window", _window, _qwen_window, _window_fix, SIZE),
    export_only("use_sliding_window", lambda config: _window(config) is not None),
    export_only("max_window_layers", lambda config: config.model.n_layers if _window(config) is None else 0),
)
QWEN2 = LLAMA._replace(
    name="Qwen2",
    types=("qwen2",),
    label=fixed_label("qwen2", "Qwen2ForCausalLM"),
    settings=(*QWEN, key("head_dim", "model.mixer.head_dim", _head_dim)),
    needs={
        **DECODER_NEEDS,
        "model.mixer.bias": (False,),
        "model.mixer.qkv_bias": (True,),
        "model.mlp.bias": (False,),
    },
    own_tokenizer=True,
)
QWEN3 = LLAMA._replace(
    name="Qwen3",
    types=("qwen3",),
    label=fixed_label("qwen3", "Qwen3ForCausalLM"),
    settings=(
        *QWEN,
        key("head_dim", "model.mixer.head_dim", _head_dim, default=128),
        key("rms_norm_eps", "model.mixer.qk_norm_eps", default=1e-6, form=float),
        ATTENTION_BIAS,
    ),
    needs={**DECODER_NEEDS, "model.mixer.qk_norm": (True,), "model.mlp.bias": (False,)},
)


# --------------------------------------------------------------------------------------------------------------- GPT-2
def _gpt2_linear(public: str, ours: str) -> tuple[Rule, ...]:
    """Return the rules of GPT-2's Conv1D, whose weight is [in, out] like ours."""
    return tuple(rule._replace(form="same") for rule in linear(public, ours))


def _gelu(hf_config: dict[str, Any]) -> str:
    activation = hf_config.get("activation_function", "gelu_new")
    return "gelu_new" if activation == "gelu_pytorch_tanh" else activation


def _gelu_fix(value: Any, hf_config: dict[str, Any]) -> dict[str, Any]:
    return {"model.mlp.approximate_gelu": value == "gelu_new"} if value in ("gelu", "gelu_new") else {}


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
        mlp_dim("n_inner", lambda hf_config: 4 * hf_config["n_embd"]),
        key("layer_norm_epsilon", "model.norm_eps", default=1e-5, form=float),
        Setting(
            "activation_function",
            lambda config: "gelu_new" if config.model.mlp.approximate_gelu else "gelu",
            _gelu,
            _gelu_fix,
            str,
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
