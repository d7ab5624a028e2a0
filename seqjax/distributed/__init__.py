"""Several processes that train one model: how they find each other, and how the loss of one ends the others.

`place.py` tells a process who it is, from flags, the environment, SLURM or a TPU's metadata. `hub.py` is a small
process that process 0 starts: it holds the roll call, JAX's coordination service and a connection to every member.
`membership.py` is a member's end of it. `topology.py` prints what they have come to.
"""
