"""Array functions that mixers share: arrays in, arrays out, no parameters."""

from seqjax.ops.delta_rule import gated_delta_rule
from seqjax.ops.straight_through import straight_through, top1_straight_through
from seqjax.ops.wkv7 import wkv7

__all__ = ["gated_delta_rule", "straight_through", "top1_straight_through", "wkv7"]
