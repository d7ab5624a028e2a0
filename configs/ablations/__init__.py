"""The ablations of arXiv 2505.18522, section 3: models with one part removed, added or replaced."""
