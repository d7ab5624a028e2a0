"""Array functions that mixers share: arrays in, arrays out, no parameters."""

from seqjax.ops.straight_through import straight_through, top1_straight_through

__all__ = ["straight_through", "top1_straight_through"]
