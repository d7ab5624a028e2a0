"""The runs of a study: what to train, how far it is, and the losses of what has run."""
