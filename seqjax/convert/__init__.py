"""Converts public models to parameters and back: weights in `.safetensors` files, settings, tokenizers.

Llama, Mistral, Qwen2, Qwen3, GPT-2, Mamba and Mamba-2 have the names of transformers; RWKV-7, DeltaNet and Gated
DeltaNet those of flash-linear-attention. The commands are `seqjax convert import` and `export`; in Python,
`seqjax.load` opens a public directory, and `import_weights` and `export_weights` serve weights alone. docs/convert.md
lists the settings that each family needs. A family is one table of tensors and one of settings (attention.py, mamba.py,
linear_attention.py), used in both directions; no tensor is dropped or invented.
"""

from seqjax.convert.weights import export_weights, import_weights

__all__ = ["export_weights", "import_weights"]
