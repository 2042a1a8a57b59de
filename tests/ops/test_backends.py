import pytest

from polyscale.ops.backends import Backend, Operation


def operation(**options):
    small = Backend(
        "small", abs, "for small numbers", why_unsupported=lambda x: "too large" if x > 9 else None
    )
    away = Backend("away", abs, "elsewhere", why_unavailable=lambda: "not on this machine")
    options.setdefault("preferred", ("away", "small", "plain"))
    return Operation("size", (Backend("plain", abs, "always"), small, away), **options)


def test_auto_takes_the_first_that_can_run():
    assert operation().choose("auto", 3).name == "small"
    assert operation().choose("auto", 30).name == "plain"


def test_the_order_may_depend_on_the_arguments():
    found = operation(preferred=lambda x: ("plain",) if x == 1 else ("small", "plain"))
    assert found.choose("auto", 1).name == "plain"
    assert found.choose("auto", 2).name == "small"


def test_a_backend_asked_for_by_name_runs_or_says_why_not():
    assert operation().choose("small", 3).run(-3) == 3
    with pytest.raises(ValueError, match="impl='small' cannot run size: too large; impl='auto'"):
        operation().choose("small", 30)
    with pytest.raises(ValueError, match="cannot run size: not on this machine"):
        operation().choose("away", 3)


def test_unknown_names_are_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match="impl must be one of 'auto', 'plain', 'small', 'away', got 'fast'"
    ):
        operation().choose("fast", 3)


def test_nothing_is_prepared_for_arguments_that_are_not_supported():
    prepared = []
    built = Backend(
        "built",
        abs,
        "built on first use",
        why_unsupported=lambda x: "negative" if x < 0 else None,
        why_unprepared=lambda: prepared.append(1),
    )
    size = Operation("size", (Backend("plain", abs, "always"), built), ("built", "plain"))
    assert size.choose("auto", -1).name == "plain"
    with pytest.raises(ValueError, match="negative"):
        size.choose("built", -1)
    assert not prepared
    assert size.run("auto", 3) == 3
    assert prepared


def test_a_backend_that_cannot_be_prepared_says_why():
    broken = Backend("broken", abs, "built", why_unprepared=lambda: "no compiler")
    size = Operation("size", (Backend("plain", abs, "always"), broken), ("broken", "plain"))
    assert size.choose("auto", 3).name == "plain"
    with pytest.raises(ValueError, match="impl='broken' cannot run size: no compiler"):
        size.choose("broken", 3)
