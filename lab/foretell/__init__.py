"""Test which recall task predicts a study's OOD losses: `python -m lab.foretell`."""
