"""Parameter-free array functions that the mixers share."""

from seqjax.ops.delta_rule import gated_delta_rule
from seqjax.ops.head_norm import head_norm
from seqjax.ops.kda import kda
from seqjax.ops.linear_attention import wkv6
from seqjax.ops.selective_scan import selective_scan
from seqjax.ops.ssd import ssd
from seqjax.ops.straight_through import straight_through, top1_straight_through
from seqjax.ops.taylor import taylor_linear_attention
from seqjax.ops.wkv7 import wkv7

__all__ = [
    "gated_delta_rule",
    "head_norm",
    "kda",
    "selective_scan",
    "ssd",
    "straight_through",
    "taylor_linear_attention",
    "top1_straight_through",
    "wkv6",
    "wkv7",
]
