"""Makes convert/FAMILY/: a tiny random public model as its own package saves it, and the logits that it gives.

Each folder holds `model.safetensors` (float16) and `config.json`, written by the package's own `save_pretrained`, and
`io.npz` with tokens [2, 21] and float32 logits [2, 21, O] of the whole public model on a CPU, from the float16 weights
read as float32. Llama, Llama 3 (RoPE scaled for more than 16 tokens), Mistral (Llama's weights, a window of 5), Qwen2,
Qwen3, Mamba, Mamba-2 and GPT-2 are transformers' classes; RWKV-7, DeltaNet and Gated DeltaNet are fla's own model
classes, whose forward runs here in Triton's interpreter.

    python -m venv oracle; oracle/bin/pip install torch==2.13.0 numpy transformers==5.23.0 einops safetensors
    oracle/bin/pip install --no-deps flash-linear-attention==0.6.0
    oracle/bin/pip install --no-deps fla-core==0.6.0
    oracle/bin/pip install --no-deps --target tritonlib triton==3.6.0 numpy==2.3.5
    oracle/bin/python tests/golden/make_convert.py hf
    TRITON_INTERPRET=1 PYTHONPATH=tritonlib oracle/bin/python tests/golden/make_convert.py fla

Triton stays out of the environment because transformers would call fla's kernels if it saw it, and its interpreter
needs numpy < 2.4. The other direction, `... make_convert.py check DIR ...` (started in the same two ways), loads what
`seqjax.convert export` wrote into DIR and compares with seqjax's logits, which somebody put into DIR/io.npz, and with
the ids of its tokenizer, if there are `text` and `ids` too.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent / "convert"
BATCH, T = 2, 21


def hf_models():
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Mamba2Config,
        Mamba2ForCausalLM,
        MambaConfig,
        MambaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    yield "llama", LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=50_000.0, attn_implementation="eager", **ids,
        )
    )  # fmt: skip
    yield (
        "gpt2",
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=48, n_positions=32, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager", **ids
            )
        ),
    )
    yield (
        "mamba",
        MambaForCausalLM(
            MambaConfig(vocab_size=48, hidden_size=16, state_size=4, num_hidden_layers=3, time_step_rank=3, **ids)
        ),
    )
    yield "mamba2", Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=48, hidden_size=16, state_size=6, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=1,
            chunk_size=8, **ids,
        )
    )  # fmt: skip
    common = {
        "vocab_size": 48, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "attn_implementation": "eager", **ids,
    }  # fmt: skip
    # Of 8 frequencies the first stays, the second is mixed, and the others are divided.
    scaled = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 4.0, "low_freq_factor": 0.25,
        "high_freq_factor": 1.0, "original_max_position_embeddings": 16,
    }  # fmt: skip
    yield (
        "llama3",
        LlamaForCausalLM(
            LlamaConfig(**common, head_dim=16, rms_norm_eps=1e-5, rope_parameters=scaled, tie_word_embeddings=True)
        ),
    )
    yield "qwen2", Qwen2ForCausalLM(Qwen2Config(**common, max_window_layers=2))
    yield (
        "qwen3",
        Qwen3ForCausalLM(Qwen3Config(**common, head_dim=8, max_window_layers=2, tie_word_embeddings=True)),
    )


def interpret_triton():
    """Let autotuned kernels take their first configuration: the tuner would ask for a GPU."""
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda self, *args, config, **kwargs: [0.0, 0.0, 0.0]


def fla_models():
    interpret_triton()
    from fla.models import (
        DeltaNetConfig,
        DeltaNetForCausalLM,
        GatedDeltaNetConfig,
        GatedDeltaNetForCausalLM,
        RWKV7Config,
        RWKV7ForCausalLM,
    )

    common = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    # the head norm's eps is head_dim * norm_eps, and the published one 64e-5
    yield "rwkv7", RWKV7ForCausalLM(
        RWKV7Config(
            **common | {"num_hidden_layers": 3}, head_dim=16, norm_eps=4e-5, decay_low_rank_dim=4, a_low_rank_dim=5,
            v_low_rank_dim=6, gate_low_rank_dim=7, fuse_norm=False,
        )
    )  # fmt: skip
    yield "deltanet", DeltaNetForCausalLM(DeltaNetConfig(**common, num_heads=2, fuse_norm=False))
    yield (
        "gated_deltanet",
        GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**common, num_heads=2, head_dim=12, fuse_norm=False)),
    )


def randomise(model):
    """Values of the size that training gives, in every parameter, rounded to what float16 holds."""
    for name, p in model.named_parameters():
        one = "norm" in name or "ln_" in name or name.endswith((".D", "k_k"))
        scale = 0.5 if p.ndim == 1 or "lora" in name or "conv1d" in name else 1.5 * p.shape[-1] ** -0.5
        value = scale * torch.randn(p.shape) + (1.0 if one and not name.endswith("bias") else 0.0)
        if ".x_" in name:  # a token shift
            value = torch.rand(p.shape)
        with torch.no_grad():
            p.copy_(value.half().float())


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(tokens).logits.float().numpy()


def save(name, model):
    randomise(model)
    model.float()
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, T))
    arrays = {"tokens": tokens.numpy().astype(np.int32), "logits": logits(model, tokens)}
    if name == "llama":
        from transformers import MistralConfig, MistralForCausalLM

        keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "rms_norm_eps")  # fmt: skip
        settings = {key: getattr(model.config, key) for key in keep} | {"sliding_window": 5, "rope_theta": 50_000.0}
        twin = MistralForCausalLM(MistralConfig(**settings, attn_implementation="eager"))
        twin.load_state_dict(model.state_dict())
        arrays["logits_window"] = logits(twin, tokens)
    model.half().save_pretrained(HERE / name)
    (HERE / name / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(HERE / name / "io.npz", **arrays)
    sys.stdout.write(f"{name}: logits up to {np.abs(arrays['logits']).max():.2f}\n")


def check(directory):
    """The public package reads the export and gives the logits that seqjax gave."""
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    if kind in ("rwkv7", "delta_net", "gated_deltanet"):
        interpret_triton()
        import fla.models  # noqa: F401 - registers the classes
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    io = np.load(directory / "io.npz")
    want = io["logits"]
    off = np.abs(logits(model, torch.tensor(io["tokens"]).long()) - want).max() / np.abs(want).max()
    sys.stdout.write(f"{directory.name}: {kind}, off by {off:.1e} of the largest logit\n")
    assert off < 1e-5
    if "text" in io:  # and its tokenizer the ids that seqjax's gave
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert tokenizer.encode(str(io["text"])) == io["ids"].tolist()
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (
            model.config.bos_token_id,
            model.config.eos_token_id,
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    what, *rest = sys.argv[1:]
    if what == "check":
        for path in rest:
            check(Path(path))
    else:
        for family in hf_models() if what == "hf" else fla_models():
            save(*family)
