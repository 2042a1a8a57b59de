"""Small data of a user, in every form that is read."""

import csv
import io
import json

from PIL import Image

WORDS = {
    "sea": ("fish", "wave", "salt", "ship", "tide"),
    "sky": ("bird", "cloud", "wind", "wing", "star"),
}


def rows(count=40):
    """(text, label), each text once; the words of a text say its label."""
    labels = sorted(WORDS)
    found = []
    for number in range(count):
        label = labels[number % 2]
        words = WORDS[label]
        first, second = words[number // 2 % 5], words[number // 10 % 5]
        found.append((f"No {number} of the {first}, and of a {second}.", label))
    return found


def as_csv(table, header=("text", "label"), **options):
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n", **options)
    writer.writerows([header, *table])
    return out.getvalue()


def write_csv(path, count=40, header=("text", "label")):
    path.write_text(as_csv(rows(count), header), encoding="utf-8")
    return path


def write_json_lines(path, count=40):
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_pages(folder, count=24, ending="md"):
    """A folder for each class."""
    for number, (text, label) in enumerate(rows(count)):
        (folder / label).mkdir(parents=True, exist_ok=True)
        page = f"# Page {number}\n\n{text}\n\n## More\n\nIt is {WORDS[label][number % 5]}.\n"
        if ending == "html":
            page = f"<h1>Page {number}</h1><p>{text}<h2>More</h2><p>It is so."
        (folder / label / f"{number}.{ending}").write_text(page, encoding="utf-8")
    return folder


def write_images(folder, count=24, size=6):
    """Dark and light images, each with a grey of its own."""
    for number in range(count):
        label = ("dark", "light")[number % 2]
        (folder / label).mkdir(parents=True, exist_ok=True)
        grey = number + (160 if label == "light" else 0)
        Image.new("L", (size, size), grey).save(folder / label / f"{number}.png")
    return folder
