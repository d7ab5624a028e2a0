"""Causal softmax attention; callers use `api`."""
