"""The language model around the mixers: embedder, blocks, remat, entropy, FLOPs."""

from seqjax.models.language_model import Model

__all__ = ["Model"]
