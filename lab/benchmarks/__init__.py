"""One-off measurements, one script per question, with the flags and reports of `benchmarks.harness`."""
