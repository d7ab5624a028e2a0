"""The ablations of arXiv 2505.18522, section 3: what is taken from, or put into, a model to see which part matters."""
