"""Search the sections of articles: `python examples/documents/search.py index`, then `serve`.

Every article is read once, sentence by sentence; a section is found by the mean of its sentences'
vectors, so that a question leads to the section that answers it and not only to its article.
"""

import argparse
import json
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file, save_file

import polyscale as ps
from reproduction.documents.articles import read_articles
from reproduction.zero_shot.pretrained import pretrained_model

HERE = Path(__file__).parent
PAGE = HERE / "search.html"


class SectionSearch:
    """Sections and their vectors, nearest first."""

    def __init__(self, model, sections, vectors):
        self.model, self.sections = model, sections
        self.vectors = torch.nn.functional.normalize(vectors, dim=-1)

    def __call__(self, question, count=10):
        """The sections nearest to a question, as dicts with title, heading, score and text."""
        (vector,) = self.model.encode([question or "?"], of="encoder")
        scores = self.vectors @ torch.nn.functional.normalize(vector, dim=0)
        best = scores.topk(min(count, len(scores)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [{**self.sections[index], "score": round(score, 3)} for index, score in pairs]


def new_model():
    """A model whose leaves are sentences, read by a frozen encoder; nothing is trained here."""
    source = pretrained_model()
    processor = ps.HTEProcessor(
        source.tokenizer(), format="markdown", leaves="sentences", key_names=("<unknown>",)
    )
    return ps.HTEForClassification.from_processor(
        processor, encoder=source.encoder(), hidden_size=32, num_labels=2
    )


def sections_of(model, article):
    """What the page shows of each section of an article, and its vector."""
    with torch.autocast("cpu", dtype=torch.bfloat16):  # three times as fast where it is native
        (found,) = model.encode([article.text], level="section", of="encoder")
    shown = []
    for text in found.texts:
        heading, _, body = text.partition("\n")
        shown.append({"title": article.title, "heading": heading.strip("# "), "text": body[:400]})
    return shown, found.vectors


def index(data_dir, folder, count, seconds=float("inf")):
    """Read articles into `folder`, one file each; what is there already is not read again."""
    folder.mkdir(parents=True, exist_ok=True)
    model, began = new_model(), time.perf_counter()
    articles = [one for one in read_articles(data_dir, 300, 4000) if "\n## " in one.text][:count]
    for number, article in enumerate(articles):
        path = folder / f"{number}.json"
        if path.exists():
            continue
        if time.perf_counter() - began > seconds:
            print(f"{number} of {len(articles)} articles; run again to go on")
            return False
        shown, vectors = sections_of(model, article)
        save_file({"vectors": vectors.half()}, path.with_suffix(".safetensors"))
        path.write_text(json.dumps(shown), encoding="utf-8")
    print(f"{len(articles)} articles in {folder}")
    return True


def load(folder):
    """The search over all articles that `index` has read."""
    paths = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    if not paths:
        raise SystemExit(f"{folder} has no articles: run the command index first")
    sections = [one for path in paths for one in json.loads(path.read_text(encoding="utf-8"))]
    vectors = [load_file(path.with_suffix(".safetensors"))["vectors"] for path in paths]
    return SectionSearch(new_model(), sections, torch.cat(vectors).float())


def serve(search, port):
    """Serve the page on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            address = urlsplit(self.path)
            if address.path == "/search":
                question = parse_qs(address.query).get("q", [""])[0][:1000]
                content, kind = json.dumps(search(question)).encode(), "application/json"
            elif address.path == "/":
                content, kind = PAGE.read_bytes(), "text/html; charset=utf-8"
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(content)

    print(f"http://localhost:{port}")
    HTTPServer(("localhost", port), Handler).serve_forever()


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("index", "ask", "serve"))
    parser.add_argument("question", nargs="?", default="")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="with enwik8")
    parser.add_argument("--index", type=Path, default=HERE / "index")
    parser.add_argument("--articles", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then stop; resumable")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if options.command == "index":
        index(options.data_dir, options.index, options.articles, options.seconds)
    elif options.command == "ask":
        for found in load(options.index)(options.question, 5):
            print(f"{found['score']:.2f} {found['title']}: {found['heading']}")
    else:
        serve(load(options.index), options.port)


if __name__ == "__main__":
    main()
