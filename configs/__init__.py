"""One file per architecture; `get_config(arg)` returns what `seqjax train --config=NAME:arg` trains."""
