"""The language model around the mixers: embedder, blocks, rematerialisation, entropy and FLOP counts."""

from seqjax.models.language_model import Model

__all__ = ["Model"]
