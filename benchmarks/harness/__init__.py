"""What the benchmarks share: flags, the models to measure, the machine, timing, tables, files and plots."""
