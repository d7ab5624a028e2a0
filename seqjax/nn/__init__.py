"""What mixers and models are made of: parameters as plain dicts, and the layers that architectures share."""
