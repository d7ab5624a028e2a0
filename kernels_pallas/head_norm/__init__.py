"""Post-recurrence block: per-head norm, optional skip term and output gate."""
