"""Lab tests run under the settings and fixtures of the other tests."""

from tests.conftest import *  # noqa: F403
from tests.study.conftest import composed, undrawn_pictures  # noqa: F401
