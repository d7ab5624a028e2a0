"""Causal softmax attention; `api` is what callers use."""
