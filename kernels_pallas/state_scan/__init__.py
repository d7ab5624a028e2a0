"""The sequential part of chunked recurrences: the states at the chunk starts, backends in `xla.py` and `triton.py`."""
