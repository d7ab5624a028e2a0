"""Tasks of lm-evaluation-harness that need no network: YAML files, and the data that they ask `data` for."""
