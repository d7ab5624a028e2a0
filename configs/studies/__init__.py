"""Studies: which runs are compared, for `python -m seqjax.study`."""
