"""Studies, which define the runs that `seqjax study` compares."""
