"""Studies: definitions of the runs that `seqjax study` compares."""
