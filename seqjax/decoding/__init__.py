"""Decoding: prefill a prompt in pieces, sample tokens one at a time, stream text."""

from seqjax.decoding.decode import PREFILL_CHUNK, Phase, Timing, tokens
from seqjax.decoding.sampling import Sampling, sample
from seqjax.decoding.text import StopStrings, TextDecoder, encode, stream

__all__ = [
    "PREFILL_CHUNK",
    "Phase",
    "Sampling",
    "StopStrings",
    "TextDecoder",
    "Timing",
    "encode",
    "sample",
    "stream",
    "tokens",
]
