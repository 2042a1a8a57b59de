"""Folders of documents, texts and images: labels from a table, or a folder for each class."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from polyscale.data.own.columns import find_column, guess_file, guess_label
from polyscale.data.own.files import decode_text
from polyscale.data.own.images import IMAGES, open_image
from polyscale.data.own.items import IMAGE, TEXT, Item, Items
from polyscale.data.own.tables import TABLES, Table, is_table, read_table, suffix_of

_MEDIA = {
    ".txt": TEXT,
    ".text": TEXT,
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".md": "markdown",
    ".markdown": "markdown",
    ".json": "json",
    ".py": "python",
    **dict.fromkeys(IMAGES, IMAGE),
}
_PARTS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}


def media_of(path: Path) -> str | None:
    """What a file holds, by its name; None if it is neither a document nor an image.

    >>> media_of(Path("a/page.HTM")), media_of(Path("a/page.pdf"))
    ('html', None)
    """
    return _MEDIA.get(path.suffix.lower())


def find_parts(folder: Path) -> dict[str, Path]:
    """The folders train, validation and test, if there is one for training; otherwise none."""
    found = {
        part: folder / name
        for part, names in _PARTS.items()
        for name in reversed(names)
        if (folder / name).is_dir()
    }
    return found if "train" in found else {}


def read_folder(
    folder: Path, *, labelled: bool, table: Path | None = None, label: str | None = None
) -> Items:
    """The documents or images below a folder; labels from a table, or from their folders."""
    chosen = table or (_find_table(folder) if labelled else None)
    if chosen is not None:
        return read_listed(read_table(chosen), folder, label, labelled=labelled)
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )
    media = Counter(kind for path in paths if (kind := media_of(path)) is not None)
    if not media:
        raise ValueError(
            f"{folder} must have documents or images ({', '.join(_MEDIA)}), got "
            f"{len(paths)} other files"
        )
    chosen_media = max(media, key=lambda kind: media[kind])
    items, left_out = [], []
    for path in paths:
        where = path.relative_to(folder)
        if media_of(path) != chosen_media:
            continue
        if labelled and len(where.parts) < 2:
            left_out.append((str(where), "in no folder of a class"))
            continue
        item = _read_item(path, str(where), where.parts[0] if labelled else None)
        if isinstance(item, Item):
            items.append(item)
        else:
            left_out.append((str(where), item))
    if labelled and not any("no folder" not in reason for _, reason in left_out) and not items:
        raise ValueError(
            f"{folder} must have a folder for each class, or a table with the labels of its "
            f"files (labels.csv), got {len(left_out)} files without either; "
            "--labels names a table, --kind language needs no labels"
        )
    _refuse_damaged(folder, items, left_out)
    return Items(str(folder), chosen_media, items, left_out, _ignored(folder, paths, chosen_media))


def read_listed(table: Table, folder: Path, label: str | None, *, labelled: bool) -> Items:
    """The files that a table names, relative to a folder, with their labels."""
    column = guess_file(table)
    if column is None:
        raise ValueError(
            f"{table.name} must have a column with names of files, such as file_name, got "
            + ", ".join(map(repr, table.columns))
        )
    if labelled:
        label = (
            guess_label(table, (column,))
            if label is None
            else find_column(table, "--label-column", label)
        )
    items: list[Item] = []
    left_out = list(table.damaged)
    media: Counter[str] = Counter()
    root = folder.resolve()
    for where, row in table.rows:
        name = str(row.get(column) or "")
        path = folder / name
        kind = media_of(path)
        answer = label_of(row.get(label)) if label is not None else None
        if not name or root not in path.resolve().parents or not path.is_file():
            left_out.append((where, f"no file {name!r}"))
        elif kind is None:
            left_out.append((where, f"{path.suffix or 'its'} files are not read"))
        elif labelled and answer is None:
            left_out.append((where, "no label"))
        else:
            item = _read_item(path, name, answer)
            if isinstance(item, Item):
                media[kind] += 1
                items.append(item)
            else:
                left_out.append((where, item))
    if len(media) > 1:
        raise ValueError(f"{table.name} must name files of one kind, got {', '.join(media)}")
    _refuse_damaged(Path(table.name), items, left_out)
    return Items(table.name, next(iter(media)), items, left_out, text=(column,), label=label)


def read_file(path: Path) -> Items:
    """A single document or image."""
    kind = media_of(path)
    if kind is None:
        raise ValueError(
            f"data must be a table ({', '.join(TABLES)}), a document or image "
            f"({', '.join(_MEDIA)}), a folder or a Hugging Face dataset, got {path}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"data must be a file or folder that exists, got {path}")
    content = path.read_bytes()
    if kind == IMAGE:
        open_image(content, str(path))
        return Items(str(path), kind, [Item(path.name, content)])
    return Items(str(path), kind, [Item(path.name, decode_text(content, str(path)))])


def label_of(value: object) -> str | None:
    """A label as text; None if there is none.

    >>> label_of(1), label_of(" spam "), label_of(""), label_of(None)
    ('1', 'spam', None, None)
    """
    if value is None or isinstance(value, (list, dict, bytes)) or value != value:
        return None
    return str(value).strip() or None


def _find_table(folder: Path) -> Path | None:
    """The table at the top of a folder that names its files; an error if several do."""
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and is_table(path)]
    if len(found) > 1:
        raise ValueError(
            f"{folder} must have one table with labels, got "
            f"{', '.join(path.name for path in found)}; --labels names one"
        )
    return found[0] if found else None


def _read_item(path: Path, where: str, label: str | None) -> Item | str:
    """A file as an item, or what is wrong with it."""
    content = path.read_bytes()
    try:
        if media_of(path) == IMAGE:
            open_image(content)
            return Item(where, content, label)
        return Item(where, decode_text(content, "it"), label)
    except ValueError as error:
        return str(error).removeprefix("it ").removeprefix("image ").split(";")[0]


def _ignored(folder: Path, paths: list[Path], media: str) -> str:
    others = Counter(suffix_of(path) or path.name for path in paths if media_of(path) != media)
    if not others:
        return ""
    kinds = ", ".join(f"{kind} ({count:,})" for kind, count in others.most_common(5))
    return f"{folder}: {others.total():,} other files are ignored: {kinds}"


def _refuse_damaged(source: Path, items: list[Item], left_out: list[tuple[str, str]]) -> None:
    if len(left_out) > len(items):
        where, reason = left_out[0]
        raise ValueError(
            f"{source} must have files that can be read, got {len(left_out):,} that cannot and "
            f"{len(items):,} that can; the first is {where}: {reason}"
        )
