"""The commands of `seqjax` that belong to no package of their own, and the door to all of them."""
