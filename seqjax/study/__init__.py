"""Compare runs at equal in-domain loss: `seqjax study --study=NAME_OR_FILE --out=DIR`."""
