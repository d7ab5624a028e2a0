"""RWKV's token shift: interpolations of every input with the one before it, one for each branch."""
