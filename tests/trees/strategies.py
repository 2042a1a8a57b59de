"""Random trees for tests, as parent arrays: the oddest shapes a SignalTree can take.

`random_parents(random.Random(seed))` for seeded loops, `parents()` and `trees()` for hypothesis.
"""

import random

from hypothesis import strategies as st

from polyscale.trees import SignalTree


def random_parents(
    rng: random.Random,
    *,
    max_leaves: int = 60,
    max_family: int = 40,
    chain_share: float = 0.25,
    shuffle: bool = False,
) -> list[int]:
    """Draw parents of a tree of uneven depth, with one-child chains and families of 1..40.

    Nodes come breadth-first, or in any order if `shuffle`. About one tree in ten is a single leaf,
    one in ten a deep chain (200 nodes deep with a family at the end), the others are grown.
    """
    kind = rng.random()
    if kind < 0.1:
        parents = [-1]
    elif kind < 0.2:
        parents = deep_chain(200, family=rng.randint(1, min(5, max_leaves)))
    else:
        parents = _grow(rng, max_leaves, max_family, chain_share)
    return shuffled(rng, parents) if shuffle else parents


def deep_chain(depth: int, *, family: int = 1, side_leaf_every: int = 0) -> list[int]:
    """Return parents of a chain whose last node, `depth` steps down, has `family - 1` siblings.

    With `side_leaf_every` k, every k-th node of the chain also has a leaf beside the chain.
    """
    parents = [-1]
    end = 0
    for step in range(1, depth):
        parents.append(end)
        following = len(parents) - 1
        if side_leaf_every and step % side_leaf_every == 0:
            parents.append(end)
        end = following
    parents.extend([end] * family)
    return parents


def shuffled(rng: random.Random, parents: list[int]) -> list[int]:
    """Return the same tree with its nodes numbered at random (siblings change order too)."""
    number = list(range(len(parents)))
    rng.shuffle(number)
    result = [-1] * len(parents)
    for node, parent in enumerate(parents):
        result[number[node]] = -1 if parent < 0 else number[parent]
    return result


def _grow(rng: random.Random, max_leaves: int, max_family: int, chain_share: float) -> list[int]:
    parents = [-1]
    leaves = 1
    open_nodes = [0]
    wish = rng.randint(1, max_leaves)
    steps = 0
    while open_nodes and leaves < wish and steps < 4 * wish:
        steps += 1
        node = open_nodes.pop(rng.randrange(len(open_nodes)))
        if rng.random() < chain_share:
            size = 1
        elif rng.random() < 0.15:
            size = rng.randint(1, max_family)
        else:
            size = rng.randint(2, 4)
        size = min(size, max_family, wish - leaves + 1)
        leaves += size - 1
        for _ in range(size):
            parents.append(node)
            open_nodes.append(len(parents) - 1)
    return parents


@st.composite
def parents(draw: st.DrawFn, max_nodes: int = 80) -> list[int]:
    """Draw parents, breadth-first; shrinks towards a single leaf."""
    families = draw(
        st.lists(st.one_of(st.integers(0, 4), st.just(1), st.integers(0, 40)), max_size=30)
    )
    result = [-1]
    for node, size in enumerate(families):
        if node >= len(result):
            break
        result.extend([node] * min(size, max_nodes - len(result)))
    return result


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 80, ordered: bool = True) -> SignalTree:
    """Draw a tree; unless `ordered`, rows are in any order and some rows have no leaf."""
    drawn = draw(parents(max_nodes))
    if ordered:
        return SignalTree.from_parents(drawn)
    inner = set(drawn)
    leaves = [node for node in range(len(drawn)) if node not in inner]
    spare = draw(st.integers(0, 3))
    chosen = draw(st.permutations(range(len(leaves) + spare)))
    rows = [-1] * len(drawn)
    for node, row in zip(leaves, chosen, strict=False):
        rows[node] = row
    return SignalTree.from_parents(drawn, rows=rows, num_rows=len(leaves) + spare)
