"""The entry point of all `seqjax` commands, and the commands train, evaluate and generate."""
