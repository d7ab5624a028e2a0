"""One-off measurements: one script per question, with flags and reports from `benchmarks.harness`."""
