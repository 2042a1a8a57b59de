import numpy as np
import pytest

from polyscale.checks import check_choice, check_flag, check_integer, check_number


def test_every_kind_of_integer_is_taken_as_an_int():
    assert type(check_integer("n", np.int64(3), least=3, most=3)) is int


@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_what_is_no_integer_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"n must be an integer of at least 1, got "):
        check_integer("n", value, least=1)


def test_the_range_is_in_the_message():
    with pytest.raises(ValueError, match=r"n must be an integer from 0 to 4, got 5; use fewer"):
        check_integer("n", 5, least=0, most=4, hint="use fewer")
    with pytest.raises(ValueError, match=r"x must be a finite number of at most 1, got 1.5"):
        check_number("x", 1.5, most=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value):
    with pytest.raises(ValueError, match="x must be a finite number, got"):
        check_number("x", value)


def test_choices_and_flags_name_what_they_got():
    with pytest.raises(ValueError, match="tie must be one of 'a', 'b', got 'c'"):
        check_choice("tie", "c", ("a", "b"))
    with pytest.raises(TypeError, match="causal must be True or False, got 1"):
        check_flag("causal", 1)
