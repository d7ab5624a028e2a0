"""Measurements, one script per question: each prints a table and writes JSON with the machine it ran on.

`harness/` holds the scripts' shared code, `results/` the recorded results.
"""
