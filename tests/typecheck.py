"""What the import hook of conftest.py checks annotations with: beartype, an int being a float as PEP 484 has it."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
