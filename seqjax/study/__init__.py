"""Compares runs at equal loss in domain: `seqjax study --study=NAME_OR_FILE --out=DIR`."""
