"""Next-token cross-entropy and its gradient, from existing logits.

The gradient is with respect to the logits.
"""
