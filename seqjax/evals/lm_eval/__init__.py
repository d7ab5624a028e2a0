"""Run lm-evaluation-harness tasks on seqjax models: `seqjax harness`."""
