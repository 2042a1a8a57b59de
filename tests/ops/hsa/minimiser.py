"""A numerical minimiser that knows the constraint and nothing of the recursion.

Each pair (i, j) that row i may see belongs to a class of pairs that must share one weight. The
classes come straight from the definition of the tie, by looking for the highest distinct ancestors
of i and j. Newton's method with the rows' sums as linear constraints then minimises
`sum_ij theta_ij (log theta_ij - s_ij)` over the weights of the classes.
"""

from __future__ import annotations

import numpy as np

from polyscale.ops.hsa.reference import Node


def paths(root: Node) -> dict[int, list[int]]:
    """Return the node numbers from the root to the leaf of each row."""
    found: dict[int, list[int]] = {}

    def walk(node: Node, path: list[int]) -> None:
        path = [*path, node.number]
        if node.row is not None:
            found[node.row] = path
        for child in node.children:
            walk(child, path)

    walk(root, [])
    return found


def tied_pairs(root: Node, tie: str) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the class of each pair of rows."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    to_leaf = paths(root)
    for i, own in to_leaf.items():
        for j, other in to_leaf.items():
            if i == j:
                found[i, j] = (-1, i)
                continue
            split = next(at for at, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
            found[i, j] = (own[split], other[split]) if tie == "blocks" else (i, -2, other[split])
    return found


def minimise(scores: np.ndarray, root: Node, tie: str) -> np.ndarray:
    """Return the matrix with the least sum of KLs; `scores` are -inf where a row sees nothing."""
    count = scores.shape[0]
    classes: dict[tuple[int, ...], int] = {}
    label = np.full((count, count), -1)
    for (i, j), tied in tied_pairs(root, tie).items():
        if scores[i, j] > -np.inf:
            label[i, j] = classes.setdefault(tied, len(classes))
    visible = label >= 0
    rows = np.flatnonzero(visible.any(1))
    number = len(classes)
    sums = np.zeros((len(rows), number))  # how often a class occurs in a row
    for at, row in enumerate(rows):
        np.add.at(sums[at], label[row][visible[row]], 1.0)
    size = np.bincount(label[visible], minlength=number).astype(float)
    mean = np.bincount(label[visible], weights=scores[visible], minlength=number) / size
    # Uniform rows obey every tie (all rows of a block see equally many others).
    start = np.where(visible, 1.0 / np.maximum(visible.sum(1, keepdims=True), 1), 0.0)
    weight = np.bincount(label[visible], weights=start[visible], minlength=number) / size

    def objective(w: np.ndarray) -> float:
        return float((size * w * (np.log(w) - mean)).sum())

    for _ in range(200):
        gradient = size * (np.log(weight) + 1.0 - mean)
        spread = weight / size  # inverse of the diagonal Hessian
        system = (sums * spread) @ sums.T
        multiplier = np.linalg.lstsq(system, -sums @ (spread * gradient), rcond=None)[0]
        step = -spread * (gradient + sums.T @ multiplier)
        decrease = float((step**2 / spread).sum())  # twice what the step promises
        if decrease < 1e-26:
            break
        length = 1.0
        falling = step < 0
        if falling.any():
            length = min(1.0, 0.99 * float((-weight[falling] / step[falling]).min()))
        # Below this the objective cannot tell better from worse, and Newton's step is exact.
        while decrease > 1e-10 and objective(weight + length * step) > objective(weight):
            length /= 2
        weight = weight + length * step
    matrix = np.zeros((count, count))
    matrix[visible] = weight[label[visible]]
    return matrix
