"""Tests of trained and of small models beyond the loss per domain."""
