"""Shared code of the benchmarks: flags, the models to measure, the machine, timing, tables, files and plots."""
