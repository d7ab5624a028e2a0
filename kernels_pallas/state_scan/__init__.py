"""The sequential part of chunked recurrences: the states at the chunk starts."""
