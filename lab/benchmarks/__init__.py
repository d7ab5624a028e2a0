"""One-off measurements, one script per question.

Flags and reports come from `benchmarks.harness`.
"""
