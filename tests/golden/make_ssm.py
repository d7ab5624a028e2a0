"""Makes mamba1.npz, mamba2.npz and gpt2.npz from transformers on CPU: outputs, and gradients by autograd.

pip install torch==2.13.0 numpy transformers==5.23.0; python tests/golden/make_ssm.py
"""

from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Mamba2Config, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

HERE = Path(__file__).parent
torch.manual_seed(0)


def randomise(module):
    """Values of the size that training gives, in every parameter."""
    for name, p in module.named_parameters():
        with torch.no_grad():
            p.copy_(
                torch.randn_like(p) * (0.5 if p.ndim > 1 else 0.3) + (1.0 if "norm" in name or name == "D" else 0.0)
            )


def save(name, **arrays):
    arrays = {k: np.asarray(v.detach().numpy() if isinstance(v, torch.Tensor) else v) for k, v in arrays.items()}
    np.savez_compressed(HERE / f"{name}.npz", **arrays)


def layer(name, mixer, to_ours, width):
    """Input, output, and the gradients of sum(output * weight), in our names and orientation."""
    randomise(mixer)
    x = torch.randn(2, 19, width, requires_grad=True)
    weight = torch.randn(2, 19, width)
    y = mixer(x)
    (y * weight).sum().backward()
    params = to_ours({k: p.detach() for k, p in mixer.named_parameters()})
    grads = to_ours({k: p.grad for k, p in mixer.named_parameters()})
    named = {f"p.{k}": v for k, v in params.items()} | {f"g.{k}": v for k, v in grads.items()}
    save(name, x=x, y=y, weight=weight, dx=x.grad, **named)


def mamba1_names(p):
    x, z = p["in_proj.weight"].T.chunk(2, dim=1)
    delta, bc = p["x_proj.weight"].T.split([2, 8], dim=1)
    return {
        "x.w": x, "z.w": z, "delta.w": delta, "bc.w": bc, "dt.w": p["dt_proj.weight"].T, "dt_bias": p["dt_proj.bias"],
        "conv.w": p["conv1d.weight"][:, 0], "conv.b": p["conv1d.bias"], "a_log": p["A_log"], "skip": p["D"],
        "out.w": p["out_proj.weight"].T,
    }  # fmt: skip


def mamba2_names(p):
    z, x, bc, dt = p["in_proj.weight"].T.split([16, 16, 8, 4], dim=1)
    conv_x, conv_bc = p["conv1d.weight"][:, 0].split([16, 8])
    bias_x, bias_bc = p["conv1d.bias"].split([16, 8])
    return {
        "x.w": x, "z.w": z, "bc.w": bc, "dt.w": dt, "dt_bias": p["dt_bias"], "a_log": p["A_log"], "skip": p["D"],
        "conv_x.w": conv_x, "conv_x.b": bias_x, "conv_bc.w": conv_bc, "conv_bc.b": bias_bc, "norm.g": p["norm.weight"],
        "out.w": p["out_proj.weight"].T,
    }  # fmt: skip


def gpt2():
    config = GPT2Config(
        vocab_size=24, n_positions=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    for name, p in model.named_parameters():
        with torch.no_grad():
            p.copy_(0.4 * torch.randn_like(p) + (1.0 if "ln_" in name and "weight" in name else 0.0))
    tokens = torch.randint(0, 24, (2, 13))
    out = model(tokens[:, :-1])
    logp = out.logits.log_softmax(-1)
    loss = -logp.gather(-1, tokens[:, 1:, None]).sum()
    loss.backward()

    def ours(p):
        named = {"embed": p["transformer.wte.weight"], "positions": p["transformer.wpe.weight"]}
        for n, a in (("g", "weight"), ("b", "bias")):
            named[f"norm.{n}"] = p[f"transformer.ln_f.{a}"]
        layers = []
        for i in range(2):
            h = {k.removeprefix(f"transformer.h.{i}."): v for k, v in p.items() if f".h.{i}." in k}
            block = {}
            for n, a in (("w", "weight"), ("b", "bias")):
                for j, part in enumerate(h[f"attn.c_attn.{a}"].chunk(3, dim=-1)):
                    block[f"mixer.{'qkv'[j]}.{n}"] = part
                block[f"mixer.out.{n}"] = h[f"attn.c_proj.{a}"]
                block[f"mlp.up.{n}"], block[f"mlp.down.{n}"] = h[f"mlp.c_fc.{a}"], h[f"mlp.c_proj.{a}"]
            for n, a in (("g", "weight"), ("b", "bias")):
                block[f"norm1.{n}"], block[f"norm2.{n}"] = h[f"ln_1.{a}"], h[f"ln_2.{a}"]
            layers.append(block)
        return named | {f"blocks.0.{k}": torch.stack([b[k] for b in layers]) for k in layers[0]}

    params = ours({k: p.detach() for k, p in model.named_parameters()})
    grads = ours({k: p.grad for k, p in model.named_parameters()})
    named = {f"p.{k}": v for k, v in params.items()} | {f"g.{k}": v for k, v in grads.items()}
    save("gpt2", tokens=tokens, logits=out.logits, loss=loss, **named)


layer(
    "mamba1",
    MambaMixer(MambaConfig(hidden_size=8, state_size=4, num_hidden_layers=1, time_step_rank=2), 0),
    mamba1_names,
    8,
)
layer(
    "mamba2",
    Mamba2Mixer(
        Mamba2Config(
            hidden_size=8, state_size=4, num_hidden_layers=1, num_heads=4, head_dim=4, n_groups=1, chunk_size=8
        ),
        0,
    ),
    mamba2_names,
    8,
)
gpt2()
