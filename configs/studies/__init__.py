"""Studies, which define the runs that `python -m seqjax.study` compares."""
