"""Sequence mixers: one class per file, derived from base.Mixer.

    mixer = seqjax.mixers.Top1Chunk(dim=512, heads=8, chunk_size=64, rngs=nnx.Rngs(0))
    y_BTD = mixer(x_BTD)

The constructor's keyword arguments are the mixer's settings. A config selects a shipped mixer by its file name
(`load`). A user's class is selected by a registered name (`register`) or by its file, `gema.py:GatedEma`.
"""

from typing import TYPE_CHECKING

from seqjax.mixers import base
from seqjax.mixers._registry import (
    as_registered,
    build,
    check,
    class_named,
    file_name,
    is_dotted,
    is_foreign,
    is_shipped,
    known,
    label,
    load,
    load_copy,
    locate,
    name_of,
    names,
    reading,
    register,
    settings_class,
    source_hashes,
    sources,
    use,
)

if TYPE_CHECKING:  # The shipped classes, for editors; `__getattr__` imports these and new ones.
    from seqjax.mixers.based_conv import BasedConv as BasedConv
    from seqjax.mixers.based_linear import BasedLinear as BasedLinear
    from seqjax.mixers.comba import Comba as Comba
    from seqjax.mixers.deltanet import DeltaNet as DeltaNet
    from seqjax.mixers.dsa import DSA as DSA
    from seqjax.mixers.fox import FoX as FoX
    from seqjax.mixers.gated_deltanet import GatedDeltaNet as GatedDeltaNet
    from seqjax.mixers.gated_deltaproduct import GatedDeltaProduct as GatedDeltaProduct
    from seqjax.mixers.gla import GLA as GLA
    from seqjax.mixers.kda import KDA as KDA
    from seqjax.mixers.log_linear_mamba2 import LogLinearMamba2 as LogLinearMamba2
    from seqjax.mixers.mamba1 import Mamba1 as Mamba1
    from seqjax.mixers.mamba2 import Mamba2 as Mamba2
    from seqjax.mixers.mamba3 import Mamba3 as Mamba3
    from seqjax.mixers.mesa_net import MesaNet as MesaNet
    from seqjax.mixers.mla import MLA as MLA
    from seqjax.mixers.mlstm import MLSTM as MLSTM
    from seqjax.mixers.msa import MSA as MSA
    from seqjax.mixers.nsa import NSA as NSA
    from seqjax.mixers.parallax import Parallax as Parallax
    from seqjax.mixers.path import PaTH as PaTH
    from seqjax.mixers.post_norm_attention import PostNormAttention as PostNormAttention
    from seqjax.mixers.precond_gated_deltanet import PrecondGatedDeltaNet as PrecondGatedDeltaNet
    from seqjax.mixers.precond_kda import PrecondKDA as PrecondKDA
    from seqjax.mixers.rwkv5 import RWKV5 as RWKV5
    from seqjax.mixers.rwkv6 import RWKV6 as RWKV6
    from seqjax.mixers.rwkv7 import RWKV7 as RWKV7
    from seqjax.mixers.rwkv7_shell import RWKV7Shell as RWKV7Shell
    from seqjax.mixers.top1_chunk import Top1Chunk as Top1Chunk
    from seqjax.mixers.top1_element import Top1Element as Top1Element
    from seqjax.mixers.transformer import Transformer as Transformer
    from seqjax.mixers.transformer_pp import TransformerPP as TransformerPP
    from seqjax.mixers.ttt_linear import TTTLinear as TTTLinear
    from seqjax.mixers.wall import Wall as Wall

__all__ = [
    "as_registered",
    "base",
    "build",
    "check",
    "file_name",
    "is_dotted",
    "is_foreign",
    "is_shipped",
    "known",
    "label",
    "load",
    "load_copy",
    "locate",
    "name_of",
    "names",
    "reading",
    "register",
    "settings_class",
    "source_hashes",
    "sources",
    "use",
]


def __getattr__(name: str) -> type[base.Mixer]:
    """Return the shipped mixer class `name`, importing its file on first use."""
    mixer = class_named(name)
    if mixer is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return mixer


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *(load(file).__name__ for file in names())})
