"""Linear attention with a decay per key channel, with or without a low-rank part of the state's transition."""
