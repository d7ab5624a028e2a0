"""Array functions that mixers share: arrays in, arrays out, no parameters."""

from seqjax.ops.linear_attention import wkv6
from seqjax.ops.selective_scan import selective_scan
from seqjax.ops.ssd import ssd
from seqjax.ops.straight_through import straight_through, top1_straight_through
from seqjax.ops.taylor import taylor_linear_attention

__all__ = ["selective_scan", "ssd", "straight_through", "taylor_linear_attention", "top1_straight_through", "wkv6"]
