"""Top-1 Element attention (arXiv 2505.18522): forward the value of the best key, backward a softmax."""
