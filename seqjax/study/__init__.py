"""Compares runs at equal training loss: `python -m seqjax.study --study=configs/studies/NAME.py --out=DIR`."""
