"""PaTH attention: later tokens' matrices multiply each key before it is scored."""
