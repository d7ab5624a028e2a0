"""Code that all Triton backends share; importing it does not import Triton."""
