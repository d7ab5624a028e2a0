"""The cross-entropy of the next token, and its gradient with respect to the logits, from logits that exist."""
