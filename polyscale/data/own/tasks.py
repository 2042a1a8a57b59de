"""The tasks that a user's data become: texts, language, documents and images."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from polyscale.checks import check_choice, check_integer
from polyscale.data.own.coding import Coder, usual_length
from polyscale.data.own.images import open_image
from polyscale.data.own.items import IMAGE, Item, name_places
from polyscale.data.own.pixels import PixelSplit, statistics
from polyscale.data.own.reading import Wanted
from polyscale.data.own.splitting import HELD_OUT, OwnSplits, choose, split_own
from polyscale.data.splits import ListSplit, TaskData, collate

TEXTS, LANGUAGE, DOCUMENTS, PIXELS = "own-texts", "own-language", "own-documents", "own-images"
OWN_TASKS = (TEXTS, LANGUAGE, DOCUMENTS, PIXELS)
PARTS = ("train", "validation", "test")
MOST_BYTES, MOST_TOKENS = 1024, 512  # the longest lengths that are chosen unasked
WINDOW = 256  # tokens of a sample of language
_DOCUMENTS = 20  # fewer texts are one stream, cut where it is; more are held out whole
_BETWEEN = "\n\n"

Columns = str | Sequence[str] | None
_Common = tuple[Any, int, bool]


def load_own_texts(
    common: _Common,
    *,
    data: str | None = None,
    text: Columns = None,
    label: str | None = None,
    labels: str | None = None,
    validation: str | None = None,
    test: str | None = None,
    digest: str | None = None,
    tokenizer: str = "bytes",
    length: int | None = None,
) -> TaskData:
    """Texts with labels as sequences of bytes or of a tokenizer's tokens."""
    wanted = Wanted(_columns(text), label, labels)
    own = split_own(data, wanted, common[1], test=test, validation=validation, digest=digest)
    _refuse_images(own, "own-documents or own-images")
    coder = Coder(None if tokenizer == "bytes" else tokenizer)
    notes = [*own.notes]
    if length is None:
        lengths = [len(coder.ids(item.text)) for item in own.items["train"]]
        most = MOST_BYTES if coder.tokenizer is None else MOST_TOKENS
        length, quantile = usual_length(lengths, most)
        notes.append(
            f"texts are cut to {length:,} {coder.unit}, because 95 % of them have at most "
            f"{quantile:,} (--length changes it)"
        )
    check_integer("length", length, least=1)
    splits = {
        part: coder.token_split(
            [item.text for item in items], _classes(items, own.label_names), length
        )
        for part, items in own.items.items()
    }
    options = {"tokenizer": tokenizer, "length": length}
    return _task(TEXTS, own, splits, notes, options, coder.collate, length, **coder.sizes)


def load_own_language(
    common: _Common,
    *,
    data: str | None = None,
    text: Columns = None,
    validation: str | None = None,
    test: str | None = None,
    digest: str | None = None,
    tokenizer: str = "bytes",
    length: int = WINDOW,
) -> TaskData:
    """Texts as one stream, of which every token is predicted from those before it."""
    check_integer("length", length, least=2)
    wanted = Wanted(_columns(text), labelled=False)
    own = split_own(data, wanted, common[1], test=test, validation=validation, digest=digest)
    _refuse_images(own, "own-documents or own-images")
    coder = Coder(None if tokenizer == "bytes" else tokenizer)
    notes = [*own.notes]
    texts = _streams(own, common[1], notes)
    splits = {}
    for part in PARTS:
        stream = coder.stream(texts[part])
        if len(stream) < 2:
            raise ValueError(
                f"{own.name} must have at least 2 {coder.unit} for {part}, got {len(stream)}; add "
                "text"
            )
        splits[part] = coder.window_split(stream, length)
    notes.append(f"samples are windows of {length:,} {coder.unit} (--length changes it)")
    options = {"tokenizer": tokenizer, "length": length}
    return _task(LANGUAGE, own, splits, notes, options, coder.collate, length, **coder.sizes)


def load_own_documents(
    common: _Common,
    *,
    data: str | None = None,
    text: Columns = None,
    label: str | None = None,
    labels: str | None = None,
    validation: str | None = None,
    test: str | None = None,
    digest: str | None = None,
    format: str | None = None,
    min_count: int = 2,
    max_words: int = 50_000,
) -> TaskData:
    """Documents, records and images with labels as trees: `polyscale.documents` reads them."""
    from polyscale.models.hte.collation import collate_trees  # imports transformers
    from polyscale.models.hte.processing import READERS, HTEProcessor

    wanted = Wanted(_columns(text), label, labels)
    own = split_own(data, wanted, common[1], test=test, validation=validation, digest=digest)
    chosen = format or ("record" if own.media == IMAGE else own.media)
    check_choice("format", chosen, READERS)
    if (chosen == "record") != (own.media in (IMAGE, "record")):
        raise ValueError(
            f"format must be 'record' for images and for several columns, and for them alone; got "
            f"{chosen!r} for {own.media}"
        )
    notes = [*own.notes]
    reader = HTEProcessor.from_documents([], format=chosen)
    read = {part: _read_documents(own.items[part], reader, notes) for part in PARTS}
    processor = HTEProcessor.from_documents(
        [document for _, document in read["train"]],
        format=chosen,
        min_count=min_count,
        max_words=max_words,
        label_names=list(own.label_names),
    )
    splits = {}
    for part, found in read.items():
        if not found:
            raise ValueError(
                f"{own.name} must have documents for {part}, got none that can be read"
            )
        classes = torch.tensor(_classes([item for item, _ in found], own.label_names))
        samples = [
            {**processor.example_of(document), "labels": answer}
            for (_, document), answer in zip(found, classes, strict=True)
        ]
        splits[part] = ListSplit(
            samples,
            [_shown(item) for item, _ in found],
            classes,
            torch.tensor([document.tree.num_leaves for _, document in found]),
        )
    longest = max(int(split.lengths.max()) for split in splits.values())
    notes.append(
        f"{chosen} documents are trees of up to {longest:,} leaves, with a vocabulary of "
        f"{len(processor.tokenizer):,} words"
    )
    config = processor.config()
    options = {"format": chosen, "min_count": min_count, "max_words": max_words}
    more = {
        "modalities": config.modalities,
        "key_names": tuple(processor.key_names),
        "processor": processor,
    }
    return _task(DOCUMENTS, own, splits, notes, options, collate_trees, longest, **more)


def load_own_images(
    common: _Common,
    *,
    data: str | None = None,
    text: Columns = None,
    label: str | None = None,
    labels: str | None = None,
    validation: str | None = None,
    test: str | None = None,
    digest: str | None = None,
    size: int = 32,
    colour: bool | None = None,
) -> TaskData:
    """Images with labels as sequences of pixels, row by row."""
    from polyscale.models.pixels import PixelProcessor  # imports transformers

    check_integer("size", size, least=2)
    wanted = Wanted(_columns(text), label, labels)
    own = split_own(data, wanted, common[1], test=test, validation=validation, digest=digest)
    if own.media != IMAGE:
        raise ValueError(f"data must be images, got {own.name} with {own.media}")
    images = {
        part: [open_image(item.content, item.where) for item in items]
        for part, items in own.items.items()
    }
    if colour is None:
        colour = any(image.mode not in ("1", "L", "LA", "I", "I;16") for image in images["train"])
    plain = PixelProcessor(size=size, colour=colour)
    pixels = {part: torch.stack([*map(plain.pixels, found)]) for part, found in images.items()}
    mean, std = statistics(pixels["train"])
    processor = PixelProcessor(size=size, colour=colour, image_mean=mean, image_std=std)
    splits = {
        part: PixelSplit(
            found, torch.tensor(_classes(own.items[part], own.label_names)), processor.values
        )
        for part, found in pixels.items()
    }
    channels = 3 if colour else 1
    notes = [
        *own.notes,
        f"images are scaled to {size} x {size} pixels, {'in colour' if colour else 'grey'}, read "
        "row by row (--set task.size=N changes it)",
    ]
    options = {"size": size, "colour": colour}
    more = {"input_channels": channels, "processor": processor}
    return _task(PIXELS, own, splits, notes, options, collate, size * size, **more)


def _task(
    name: str,
    own: OwnSplits,
    splits: dict[str, Any],
    notes: list[str],
    options: dict[str, Any],
    collator: Any,
    max_length: int,
    **more: Any,
) -> TaskData:
    """The task; `source["options"]` has what was guessed, so that a run can be repeated."""
    test = splits["test"]
    answer = "every token from those before it"
    if own.label_names:
        answer = own.label_names[int(test.labels[0])]
    resolved = {**options, "text": list(own.text) or None, "digest": own.digest}
    if own.label is not None:
        resolved["label"] = own.label
    sizes: dict[str, Any] = {
        "vocab_size": None,
        "input_channels": None,
        "pad_token_id": None,
        **more,
    }
    return TaskData(
        name=name,
        kind="language" if name == LANGUAGE else "classification",
        train=splits["train"],
        validation=splits["validation"],
        test=test,
        collate=collator,
        num_labels=len(own.label_names) or None,
        max_length=max_length,
        label_names=own.label_names or None,
        source={
            "resolved": resolved,
            "splits": {part: len(splits[part]) for part in PARTS},
            "media": own.media,
            "notes": notes,
        },
        example=f"{test.text(0)[:400]} -> {answer}",
        **sizes,
    )


def _columns(text: Columns) -> tuple[str, ...]:
    if text is None:
        return ()
    return tuple(text.split(",")) if isinstance(text, str) else tuple(text)


def _classes(items: Sequence[Item], names: tuple[str, ...]) -> list[int]:
    numbers = {name: number for number, name in enumerate(names)}
    return [numbers[str(item.label)] for item in items]


def _shown(item: Item) -> str:
    if isinstance(item.content, bytes):
        return f"the image {item.where}"
    return item.text[:2_000]


def _refuse_images(own: OwnSplits, tasks: str) -> None:
    if own.media == IMAGE:
        raise ValueError(f"data must be texts, got the images of {own.name}; use {tasks}")


def document_content(item: Item) -> Any:
    """An item as `HTEProcessor.read` takes it: images become records of one field."""
    return {"image": open_image(item.content)} if isinstance(item.content, bytes) else item.content


def _read_documents(items: list[Item], reader: Any, notes: list[str]) -> list[tuple[Item, Any]]:
    """The items with their trees; those that make none are left out and noted."""
    found, left_out = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for item in items:
            try:
                found.append((item, reader.read(document_content(item))))
            except (ValueError, TypeError, RecursionError) as error:
                left_out.append((item.where, str(error).split(";")[0]))
    if left_out:
        notes.append(f"left out {len(left_out):,} documents: {name_places(left_out)}")
    large = sum("is split into windows" in str(warning.message) for warning in caught)
    if large:
        notes.append(f"{large:,} documents have long families, which are split into windows")
    return found


def _streams(own: OwnSplits, seed: int, notes: list[str]) -> dict[str, str]:
    """The text of each split: whole texts are held out, or the end of the stream if there are few.

    What the user gave as validation and test stays as it is.
    """
    items = dict(own.items)
    missing = [part for part in ("validation", "test") if part not in items]
    train = items["train"]
    if missing and len(train) >= _DOCUMENTS:
        order = {item.key: number for number, item in enumerate(train)}
        size = max(1, round(HELD_OUT * len(train)))
        for part in missing:
            items[part], train = choose(train, size, seed)
            items[part].sort(key=lambda item: order[item.key])
        notes.append(
            f"held out {size:,} of {len(own.items['train']):,} texts each for "
            f"{' and '.join(missing)} (seed {seed})"
        )
    texts = {
        part: _BETWEEN.join(item.text for item in (train if part == "train" else found))
        for part, found in items.items()
    }
    if missing and len(own.items["train"]) < _DOCUMENTS:
        whole, left = texts["train"], len(texts["train"])
        for part in reversed(missing):  # the end of the text is for the test
            size = round(HELD_OUT / 2 * len(whole))
            texts[part] = whole[left - size : left]
            left -= size
        texts["train"] = whole[:left]
        notes.append(
            f"held out the last {len(whole) - left:,} of {len(whole):,} characters for "
            f"{' and '.join(missing)}"
        )
    return texts
