"""Linear attention with a decay per key channel: a state of key-value pairs, each channel of which forgets by itself."""
