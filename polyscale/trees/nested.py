"""Trees from nested lists, dicts and sets."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from polyscale.checks import check_choice
from polyscale.trees.tree import SignalTree

ARRAYS = ("leaf", "sequence")


def from_nested(
    nested: Any, arrays: str | None = None, name: str = "nested"
) -> tuple[SignalTree, list[Any]]:
    """Return the tree of `nested` and its leaves in row order; see `SignalTree.from_nested`.

    `name` is what errors call the data.
    """
    if arrays is not None:
        check_choice("arrays", arrays, ARRAYS)
    nested = _plain(nested, arrays, name)
    parents: list[int] = [-1]
    domains: list[str | None] = [domain_of(nested)]
    keys: list[str | None] = [None]
    leaves: list[Any] = []
    # A stack of open containers, not recursion: data may be nested deeper than Python's stack.
    stack: list[tuple[int, Any, Iterator[tuple[str, str | None, Any]]]] = []
    path: list[str] = [name]
    inside: set[int] = set()

    def enter(node: int, value: Any) -> None:
        if domains[node] is None:
            leaves.append(value)
            path.pop()
            return
        if id(value) in inside:
            raise ValueError(f"{''.join(path)}: node {node} contains itself; a tree has no cycles")
        if not len(value):
            raise ValueError(
                f"{''.join(path)}: node {node} is an empty {type(value).__name__}: "
                "it has no children and carries no row"
            )
        inside.add(id(value))
        stack.append((node, value, _members(value, path)))

    enter(0, nested)
    while stack:
        node, value, members = stack[-1]
        member = next(members, None)
        if member is None:
            stack.pop()
            inside.discard(id(value))
            path.pop()
            continue
        label, key, child = member
        path.append(label)
        child = _plain(child, arrays, path)
        parents.append(node)
        domains.append(domain_of(child))
        keys.append(key)
        enter(len(parents) - 1, child)
    return SignalTree.from_parents(parents, domains=domains, keys=keys), leaves


def domain_of(value: Any) -> str | None:
    """The domain of a container; None for what is a leaf, in nested data and records alike."""
    if isinstance(value, Mapping):
        return "keyed"
    if isinstance(value, AbstractSet):
        return "set"
    is_text = isinstance(value, (str, bytes, bytearray, memoryview))
    return "sequence" if isinstance(value, Sequence) and not is_text else None


def is_array(value: Any) -> bool:
    """Whether it is an ndarray, a tensor or the like, of one dimension or more."""
    return hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0


def _plain(value: Any, arrays: str | None, path: str | list[str]) -> Any:
    """The value, an array as `arrays` says; what could be a leaf or a family is refused."""
    if isinstance(value, Iterator):
        raise TypeError(
            f"{''.join(path)} is an iterator ({type(value).__name__}), which can be read "
            "only once; pass list(...) of it"
        )
    if not is_array(value) or arrays == "leaf":
        return value
    if arrays == "sequence":
        return value.tolist()
    raise TypeError(
        f"{''.join(path)} is an array ({type(value).__name__} {list(value.shape)}): one leaf or a "
        'family? Pass arrays="leaf" for a leaf, such as a word vector, or arrays="sequence" for a '
        "family of its entries"
    )


def _members(value: Any, path: list[str]) -> Iterator[tuple[str, str | None, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the keys of {''.join(path)} must be str, got {key!r}")
            yield f"[{key!r}]", key, child
    elif isinstance(value, AbstractSet):
        for child in _steady_order(value):
            yield "{...}", None, child
    else:
        for index, child in enumerate(value):
            yield f"[{index}]", None, child


def _steady_order(members: AbstractSet[Any]) -> list[Any]:
    # Strings hash differently in every process; sorting gives a set the same rows each time.
    try:
        if not any(isinstance(member, (AbstractSet, tuple)) for member in members):
            return sorted(members)
    except TypeError:
        pass
    return sorted(members, key=repr)
