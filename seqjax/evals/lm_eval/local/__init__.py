"""Tasks of lm-evaluation-harness that need no network: YAML files, and the module `data` with their texts."""
