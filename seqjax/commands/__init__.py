"""The entry point of all `seqjax` commands, and the commands without a package of their own."""
