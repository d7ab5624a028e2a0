"""The `seqjax` entry point, and the commands train, evaluate and generate."""
