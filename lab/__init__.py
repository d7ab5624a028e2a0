"""The lab notebook: runs, tables, one-off scripts and logs.

It uses seqjax and is not in the wheel.
"""
