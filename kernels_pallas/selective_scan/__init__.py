"""The selective scan of Mamba-1: `vjp.py` is the function, `xla.py` and `triton.py` run it."""
