"""RWKV-7's recurrence operands from its projections: decays, keys and values."""
