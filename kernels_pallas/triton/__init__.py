"""The shared parts of the Triton backends of all ops; importing this package does not import Triton."""
