"""Which training samples are held out for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def choose_validation(
    contents: Sequence[bytes], labels: Sequence[int], fraction: float, seed: int
) -> list[bool]:
    """For each sample, whether it is held out for validation: `fraction` of every class.

    Samples with equal content stay together. The choice depends on the contents and the seed, not
    on the order of the samples, so a file and the Hub give the same split.

    >>> choose_validation([b"a", b"b", b"a", b"c"], [0, 0, 0, 0], 0.5, seed=0)
    [True, False, True, False]
    """
    copies: dict[bytes, list[int]] = {}
    for index, content in enumerate(contents):
        copies.setdefault(content, []).append(index)
    salt = f"{seed}:".encode()
    ranked = sorted(copies, key=lambda content: hashlib.sha256(salt + content).digest())
    wanted = {label: round(fraction * labels.count(label)) for label in set(labels)}
    chosen = [False] * len(contents)
    for content in ranked:
        indices = copies[content]
        label = min(labels[index] for index in indices)
        # A sample with more copies than are still wanted stays in training: sizes are exact.
        if len(indices) <= wanted[label]:
            wanted[label] -= len(indices)
            for index in indices:
                chosen[index] = True
    if not any(chosen) or all(chosen):
        raise ValueError(
            f"{fraction:.0%} of {len(contents)} training samples cannot be held out for "
            "validation: there are too few samples"
        )
    return chosen
