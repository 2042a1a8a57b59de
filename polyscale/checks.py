"""Checks of arguments, in one wording: the argument, what it must be, what it got, what to do."""

import math
from collections.abc import Iterable
from operator import index
from typing import Any


def check_integer(
    name: str, value: Any, least: int | None = None, most: int | None = None, hint: str = ""
) -> int:
    """The value as an int, from any kind of integer but a bool; otherwise an error.

    >>> check_integer("levels", 3, least=1)
    3
    >>> check_integer("levels", 0, least=1, hint="use levels=1 for standard attention")
    Traceback (most recent call last):
    ValueError: levels must be an integer of at least 1, got 0; use levels=1 for standard attention
    """
    expected = f"an integer{_between(least, most)}"
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(_message(name, expected, value, hint))
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(_message(name, expected, value, hint))
    return number


def check_number(
    name: str, value: Any, least: float | None = None, most: float | None = None, hint: str = ""
) -> float:
    """The value as a float if it is a finite number in the range; otherwise an error.

    >>> check_number("dropout", 0.5, least=0, most=1)
    0.5
    """
    expected = f"a finite number{_between(least, most)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(_message(name, expected, value, hint))
    inside = (least is None or value >= least) and (most is None or value <= most)
    if not math.isfinite(value) or not inside:
        raise ValueError(_message(name, expected, value, hint))
    return float(value)


def check_choice(name: str, value: Any, choices: Iterable[Any], hint: str = "") -> None:
    """Raise unless the value is one of the choices.

    >>> check_choice("tie", "rows", ("blocks", "columns"))
    Traceback (most recent call last):
    ValueError: tie must be one of 'blocks', 'columns', got 'rows'
    """
    choices = tuple(choices)
    if value not in choices:
        expected = f"one of {', '.join(map(repr, choices))}"
        raise ValueError(_message(name, expected, value, hint))


def check_flag(name: str, value: Any, hint: str = "") -> None:
    """Raise unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(_message(name, "True or False", value, hint))


def _between(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f" of at most {most}"
    return f" of at least {least}" if most is None else f" from {least} to {most}"


def _message(name: str, expected: str, value: Any, hint: str) -> str:
    return f"{name} must be {expected}, got {value!r}" + (f"; {hint}" if hint else "")
