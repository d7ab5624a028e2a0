"""Recall and state tasks that models of two layers learn in minutes: what a mixer looks up, and what it tracks."""
