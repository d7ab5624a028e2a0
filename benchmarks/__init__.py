"""Measurements, one script per question: each prints a table and writes JSON with the machine it ran on.

`harness/` holds what the scripts share, `results/` what was recorded.
"""
