"""Post-recurrence block: per-head norm, a skip connection and an output gate."""
