"""Linear attention with a decay per key channel and an optional low-rank part."""
