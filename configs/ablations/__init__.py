"""Ablations of arXiv 2505.18522, section 3, and of the reference hybrid: a part removed, added or replaced."""
