"""Settings with several types: their values in Python and on the command line."""

from typing import Annotated, Any, Literal

import pytest

from seqjax.config.parse import read
from seqjax.errors import UserError
from seqjax.fields import Bounds, checked

NORM, RANK = bool | Literal["full"], int | Literal["full"] | None


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (NORM, "True", True),
        (NORM, "false", False),
        (NORM, "full", "full"),
        (NORM, "'full'", "full"),
        (RANK, "64", 64),
        (RANK, "full", "full"),
        (RANK, "None", None),
        (int | str, "a", "a"),
        (float | tuple[float, ...], "2", 2.0),
    ],
)
def test_a_value_may_have_any_of_its_types(hint: Any, text: str, value: Any):
    got = checked(hint, read(hint, text), "key")
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(
    ("hint", "value", "known"),
    [
        (NORM, "ful", "bool or full"),
        (NORM, 3, "bool or full"),
        (RANK, 0.5, "int or full or None"),
        (NORM, None, "bool or full"),
    ],
)
def test_another_value_is_refused_with_all_types(hint: Any, value: Any, known: str):
    with pytest.raises(UserError, match=f"^key .*{known}"):
        checked(hint, value, "key")


def test_bounds_hold_for_a_number_or_none():
    hint = Annotated[int | None, Bounds(1)]
    assert checked(hint, None, "key") is None
    with pytest.raises(UserError, match=r"^key .* 1, or None"):
        checked(hint, 0, "key")
