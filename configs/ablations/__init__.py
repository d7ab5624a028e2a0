"""Ablations of arXiv 2505.18522, section 3: a part removed, added or replaced."""
