"""Recall and state-tracking tasks that models of two layers learn in minutes."""
