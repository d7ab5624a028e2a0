"""Converts public models to parameters and back: weights in `.safetensors` files, settings, tokenizers.

Llama, Mistral, Qwen2, Qwen3, GPT-2, Mamba and Mamba-2 use transformers' names. RWKV-7, DeltaNet and Gated DeltaNet use
flash-linear-attention's names. The commands are `seqjax convert import` and `export`. In Python, `seqjax.load` opens a
public directory; `import_weights` and `export_weights` handle weights without settings or tokenizer. docs/convert.md
lists the settings that each family needs. A family has a tensor table and a settings table (attention.py, mamba.py,
linear_attention.py), used in both directions. No tensor is dropped or invented.
"""

from seqjax.convert.weights import export_weights, import_weights

__all__ = ["export_weights", "import_weights"]
