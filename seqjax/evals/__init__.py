"""Evaluate models with harness tasks, long-context tests and recall tasks."""
