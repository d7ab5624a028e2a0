"""Mamba-3's recurrence operands: biased and rotated keys and queries per head."""
