"""seqjax: does a sequence mixer cost a language model base capabilities, and how fast is it? (arXiv 2505.18522)."""

__version__ = "0.1.0"
