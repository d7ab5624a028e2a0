"""Public weights in and out, as `.safetensors`.

Llama, Mistral, GPT-2, Mamba and Mamba-2 as transformers names them; RWKV-7, DeltaNet and Gated DeltaNet as fla does.

`python -m seqjax.convert import` and `export` on the command line, `import_weights` and `export_weights` in Python.
docs/convert.md says which settings each family needs. A family is one table of tensors and one of settings
(attention.py, mamba.py, linear_attention.py), read in both directions; nothing is dropped or made up on the way.
"""

from seqjax.convert.weights import export_weights, import_weights

__all__ = ["export_weights", "import_weights"]
