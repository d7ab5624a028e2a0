"""Sequence mixers, one per file with a frozen `Config` and a `Mixer` that derives from base.Mixer.

A config selects one by name (`load`); a class of your own gets a name by `register`. One by itself is an nnx module:

    mixer = seqjax.mixers.Top1Chunk(dim=512, heads=8, chunk_size=64, rngs=nnx.Rngs(0))
    y_BTD = mixer(x_BTD)
"""

from typing import TYPE_CHECKING

from seqjax.mixers import base
from seqjax.mixers._registry import Definition, definition_of, is_foreign, known, load, names, register
from seqjax.mixers._standalone import CLASSES, StandAlone, standalone

if TYPE_CHECKING:
    BasedConv: type[StandAlone]
    BasedLinear: type[StandAlone]
    DeltaNet: type[StandAlone]
    GatedDeltaNet: type[StandAlone]
    Mamba1: type[StandAlone]
    Mamba2: type[StandAlone]
    RWKV5: type[StandAlone]
    RWKV6: type[StandAlone]
    RWKV7: type[StandAlone]
    RWKV7Shell: type[StandAlone]
    Top1Chunk: type[StandAlone]
    Top1Element: type[StandAlone]
    Transformer: type[StandAlone]
    TransformerPP: type[StandAlone]

__all__ = [
    "RWKV5",
    "RWKV6",
    "RWKV7",
    "BasedConv",
    "BasedLinear",
    "Definition",
    "DeltaNet",
    "GatedDeltaNet",
    "Mamba1",
    "Mamba2",
    "RWKV7Shell",
    "StandAlone",
    "Top1Chunk",
    "Top1Element",
    "Transformer",
    "TransformerPP",
    "base",
    "definition_of",
    "is_foreign",
    "known",
    "load",
    "names",
    "register",
    "standalone",
]


def __getattr__(name: str) -> type[StandAlone]:
    """Return the class of a mixer by itself, whose file is imported now."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return standalone(CLASSES[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
