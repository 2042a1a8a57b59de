"""What is held out of a user's data: seeded, stratified, and no content on both sides."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyscale.data.own.items import Item, Items, digest_of, name_places
from polyscale.data.own.reading import Wanted, read_source

HELD_OUT = 0.1  # of each class, for validation and for test
_MOST_CLASSES = 0.5  # of the rows


@dataclass(frozen=True)
class OwnSplits:
    """The items of each split, and what is to be said of them."""

    name: str
    media: str
    items: dict[str, list[Item]]  # train, validation, test; for language perhaps train alone
    label_names: tuple[str, ...]
    text: tuple[str, ...]
    label: str | None
    digest: str
    notes: list[str] = field(default_factory=list)


def split_own(
    data: str | None,
    wanted: Wanted,
    seed: int,
    *,
    test: str | None = None,
    validation: str | None = None,
    digest: str | None = None,
) -> OwnSplits:
    """Read a user's data and hold out what has no source of its own.

    With a `digest`, that of an earlier reading, other content is refused.
    """
    if not data:
        raise ValueError("data must be a file, a folder or a dataset, got none; use --data my.csv")
    sources = read_source(data, wanted)
    columns = Wanted(sources["train"].text, sources["train"].label, None, wanted.labelled)
    for part, other in (("test", test), ("validation", validation)):
        if other is not None:
            sources[part] = read_source(other, columns if sources["train"].text else wanted)[
                "train"
            ]
            if sources[part].media != sources["train"].media:
                raise ValueError(
                    f"{part} must be of the kind of data ({sources['train'].media}), got "
                    f"{sources[part].media}"
                )
    found = digest_of({part: source.items for part, source in sources.items()})
    if digest is not None and digest != found:
        raise ValueError(
            f"data must be as they were when the run began (digest {digest}), got another content "
            f"of {data} (digest {found}); restore it, or train in another folder"
        )
    notes = [note for source in sources.values() for note in source.notes()]
    items = {part: source.items for part, source in sources.items()}
    items["train"] = _without_copies(items, notes, labelled=wanted.labelled)
    names: tuple[str, ...] = ()
    if wanted.labelled:
        names = _label_names(items["train"], sources["train"])
        _check_known(items, names)
        items = _hold_out(items, names, seed, notes)
    first = sources["train"]
    return OwnSplits(first.name, first.media, items, names, first.text, first.label, found, notes)


def choose(items: Sequence[Item], count: int, seed: int) -> tuple[list[Item], list[Item]]:
    """`count` items by a random order that follows from their contents, and the others."""
    salt = f"{seed}:".encode()
    ranked = sorted(
        range(len(items)), key=lambda index: hashlib.sha256(salt + items[index].key).digest()
    )
    held = set(ranked[:count])
    return (
        [item for index, item in enumerate(items) if index in held],
        [item for index, item in enumerate(items) if index not in held],
    )


def _without_copies(
    items: dict[str, list[Item]], notes: list[str], *, labelled: bool
) -> list[Item]:
    """The training items, each content once, and none of validation or test."""
    elsewhere = {item.key for part in items if part != "train" for item in items[part]}
    labels: dict[bytes, set[str | None]] = {}
    for item in items["train"]:
        labels.setdefault(item.key, set()).add(item.label)
    kept: dict[bytes, Item] = {}
    copies = held = 0
    unclear: list[tuple[str, str]] = []
    for item in items["train"]:
        if item.key in elsewhere:
            held += 1
        elif len(labels[item.key]) > 1:
            unclear.append((item.where, str(item.label)))
        elif item.key in kept:
            copies += 1
        else:
            kept[item.key] = item
    if copies:
        notes.append(f"left out {copies:,} copies of other rows")
    if held:
        notes.append(f"left out {held:,} training rows that are also held out")
    if unclear and labelled:
        notes.append(
            f"left out {len(unclear):,} rows whose content has several labels: "
            + name_places(unclear)
        )
    return list(kept.values())


def _label_names(items: list[Item], source: Items) -> tuple[str, ...]:
    counts = Counter(str(item.label) for item in items)
    where = source.label or "label"
    if len(counts) < 2:
        raise ValueError(
            f"{source.name} must have at least two labels, got only {next(iter(counts), None)!r} "
            f"in {where!r}"
        )
    if len(counts) > max(2, _MOST_CLASSES * len(items)):
        raise ValueError(
            f"{where!r} must be a column of classes, got {len(counts):,} different values in "
            f"{len(items):,} rows; name another one with --label-column"
        )
    # 2 before 10, as a reader would order them.
    return tuple(
        sorted(counts, key=lambda name: (not re.fullmatch(r"-?\d+", name), _number(name), name))
    )


def _number(name: str) -> int:
    return int(name) if re.fullmatch(r"-?\d+", name) else 0


def _check_known(items: dict[str, list[Item]], names: tuple[str, ...]) -> None:
    for part, found in items.items():
        for item in found:
            if item.label not in names:
                raise ValueError(
                    f"labels of {part} must be among those of train ({', '.join(names[:10])}), "
                    f"got {item.label!r} in {item.where}"
                )


def _hold_out(
    items: dict[str, list[Item]], names: tuple[str, ...], seed: int, notes: list[str]
) -> dict[str, list[Item]]:
    missing = [part for part in ("test", "validation") if part not in items]
    order = {item.key: number for number, item in enumerate(items["train"])}
    parts: dict[str, list[Item]] = {"train": [], **{part: [] for part in missing}}
    for name in names:
        rows = [item for item in items["train"] if item.label == name]
        least = 1 + len(missing)
        if len(rows) < least:
            raise ValueError(
                f"label {name!r} must have at least {least} different rows (for train"
                f"{''.join(f', {part}' for part in missing)}), got {len(rows)}; add rows, or leave "
                "the label out"
            )
        size = max(1, round(HELD_OUT * len(rows)))
        for number, part in enumerate(missing):
            held, rows = choose(rows, min(size, len(rows) - (len(missing) - number)), seed)
            parts[part] += held
        parts["train"] += rows
    for part in parts:
        parts[part].sort(key=lambda item: order[item.key])
    if missing:
        sizes = " and ".join(f"{len(parts[part]):,} for {part}" for part in reversed(missing))
        notes.append(
            f"held out {sizes}, {100 * HELD_OUT:.0f} % of every label (seed {seed}); "
            f"{len(parts['train']):,} rows are for training"
        )
    return {**items, **parts}
