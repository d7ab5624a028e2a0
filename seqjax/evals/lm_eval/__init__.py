"""Models of seqjax in lm-evaluation-harness: `seqjax harness`."""
