"""Share settings and fixtures with the library tests."""

from tests.conftest import *  # noqa: F403
from tests.study.conftest import composed, undrawn_pictures  # noqa: F401
