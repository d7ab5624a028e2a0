"""What stands before RWKV-7's recurrence: decays, keys, their removal and the values, from projections."""
