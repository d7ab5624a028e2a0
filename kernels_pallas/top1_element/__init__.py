"""Top-1 Element attention (arXiv 2505.18522).

Forward it returns the value of the best key; backward it uses a softmax gradient.
"""
