"""KDA and Gated DeltaNet-2, from the pre-activations of their gates."""
