"""Array functions that mixers share: arrays in, arrays out, no parameters."""

from seqjax.ops.linear_attention import wkv6
from seqjax.ops.ssd import ssd
from seqjax.ops.straight_through import straight_through, top1_straight_through

__all__ = ["ssd", "straight_through", "top1_straight_through", "wkv6"]
