"""Measurements: each module prints a table and writes JSON with the device and versions under `results/`."""
