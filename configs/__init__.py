"""One file per architecture; `seqjax train --config=NAME:arg` trains it.

`get_config(arg)` returns the config.
"""
