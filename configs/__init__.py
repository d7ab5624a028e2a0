"""One file per architecture; `get_config(arg)` returns what `python -m seqjax.main --config=FILE.py:arg` trains."""
