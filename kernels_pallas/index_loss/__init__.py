"""The loss of an index that chooses blocks of keys.

Source: arXiv 2606.13392 (MSA).
"""
