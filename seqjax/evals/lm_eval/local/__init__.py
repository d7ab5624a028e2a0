"""Harness tasks that need no network: YAML files, and their texts in `data`."""
