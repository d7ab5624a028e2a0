"""Compares runs at equal loss in domain: `python -m seqjax.study --study=configs/studies/NAME.py --out=DIR`."""
