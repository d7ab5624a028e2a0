"""Give the lab tests the environment, hooks and fixtures of `tests/conftest.py`."""

from tests.conftest import *  # noqa: F403 - hooks and fixtures are found by name
