"""Mamba-2's recurrence with one decay per head: `vjp.py` is the function, `xla.py` and `triton.py` run it."""
