"""RWKV's token shift: interpolate each input with the previous one, per branch."""
