"""The (gated) delta rule: a linear-attention state that is corrected towards each value."""
