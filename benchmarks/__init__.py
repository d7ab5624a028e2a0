"""Measurements: each module prints a table and writes JSON with the device and versions under `results/`."""

from kernels_pallas import cpu_compiler

cpu_compiler.use_safe_fusions()  # each module is a command, and JAX has not started yet
