"""Evaluate models beyond the loss per domain: harness tasks, long-context tests, recall."""
