"""What the Triton backends of all ops share; importing it imports nothing of Triton."""
