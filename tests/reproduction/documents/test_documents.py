"""The study of long structured documents, on articles and with an encoder of its own."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from polyscale.documents import read_html
from reproduction.documents import DocumentStudy, measures
from reproduction.documents.articles import markdown_of, topic_of
from reproduction.documents.presets import PRESETS, ROWS
from reproduction.documents.round_trip import check_file, misplaced
from reproduction.documents.tasks import make_tasks
from reproduction.documents.training import Inputs
from reproduction.documents.vectors import VectorFile
from reproduction.records import Records
from tests.reproduction.zero_shot.samples import BAD, GOOD, write_model

SMALL = replace(PRESETS["cpu"], name="small", words=(10, 1000), seeds=(0, 1), epochs=1, orders=2)


def article(number: int) -> str:
    words = random.Random(number)
    topic, some = (("Actors", GOOD), ("Cities", BAD))[number % 2]
    parts = ["{{box|a}}'''Film''' was [[plot|the plot]].", "[[Category:" + topic + "]]"]
    for heading in ("Life", "Work", "Death", "See also"):
        sentences = [f"The {words.choice(some)} film of {heading} was a song." for _ in range(4)]
        parts.append(f"== {heading} ==\n{' '.join(sentences)}")
    text = "\n".join(parts).replace("<", "&lt;")
    return f"<page><title>Article {number}</title><text>{text}</text></page>"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    pages = [article(number) for number in range(24)]
    pages.append("<page><title>Template:x</title><text>" + "word " * 50 + "</text></page>")
    # What comes before the first page and after the last break is not read.
    (folder / "enwik8").write_text("<mediawiki>" + "".join(pages) + "<page>")
    return folder


def test_an_article_is_markdown_without_what_names_its_topic():
    source = (
        "{{a|{{b}}}}'''Vega''' is [[star|a star]] [http://x at x].[[Image:v.png|of [[Vega]]]]\n"
        "{| class=x\n|cell\n|}\n== Light ==\n* blue\n** bright\n[[de:Wega]] [[Category:Stars]]"
    )
    expected = "# Vega\n\nVega is a star at x.\n\n\n\n## Light\n\n- blue\n  - bright\n"
    assert markdown_of("Vega", source) == expected
    assert (
        topic_of("[[Category:1832 births]][[Category:Rivers]] [[category:Novelists]]") == "people"
    )
    assert topic_of("[[Category:Xyz]]") is None


def test_tasks_have_disjoint_articles_and_both_orders(data):
    order, topics = make_tasks(SMALL, data)
    assert order.sentences == topics.sentences
    titles = [{sample.text.split("\n")[0] for sample in order.parts[part]} for part in order.parts]
    assert sum(map(len, titles)) == len(set.union(*titles)) == 24
    for part in ("validation", "test"):
        assert order.labels(part).float().mean() == 0.5
    # Each epoch has every article as it is and in one other order.
    assert [sum(one.label for one in order.epoch(turn)) for turn in (0, 1)] == [12, 12]
    assert len(order.epoch(0)) == 24
    for sample in order.samples():
        headings = [line for line in sample.text.split("\n") if line.startswith("## ")]
        assert sorted(headings) == ["## Death", "## Life", "## Work"]
        assert (headings == ["## Life", "## Work", "## Death"]) == (sample.label == 0)
        leaves = [order.sentences[number] for number in sample.sentences]
        assert all(leaf in sample.text for leaf in leaves)
    assert {one.label for one in topics.parts["train"]} == {0, 1}


def test_a_shuffled_tree_has_the_same_shape_and_sentences(data):
    (order, _) = make_tasks(SMALL, data)
    sample = order.parts["test"][0]
    vectors = torch.randn(len(order.sentences), 4)
    plain, shuffled, flat = (
        Inputs(vectors, kind).batch([sample]) for kind in ("document", "shuffled", "flat")
    )
    assert plain["tree"] == shuffled["tree"]
    assert flat["tree"].max_depth == 1
    rows = [batch["inputs"]["text"] for batch in (plain, shuffled)]
    assert not torch.equal(*rows)
    assert torch.equal(*(part.sort(dim=0).values for part in rows))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("encoder") / "small")
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=64)
    model = AutoModel.from_pretrained(folder).eval()
    return SimpleNamespace(name="small", encoder=lambda: model, tokenizer=lambda: tokenizer)


def test_vectors_are_made_piece_by_piece(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("reproduction.documents.vectors.PIECE", 3)
    texts = ["the film was grand", "a dull plot", "fine", "the cast", "warm and bright scene"]
    file = VectorFile(tmp_path, "some")
    parts = encoder.encoder(), encoder.tokenizer(), 32
    file.encode(texts[:3], *parts)
    (first,) = file.folder.glob("*.safetensors")
    written = first.stat().st_mtime_ns
    assert file.encode(texts, *parts) > 0
    assert first.stat().st_mtime_ns == written
    found = file.load()
    assert found.shape == (5, 16)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(5), atol=2e-3, rtol=0)
    alone = VectorFile(tmp_path, "one")
    alone.encode(texts[4:], *parts)
    torch.testing.assert_close(alone.load()[0], found[4], atol=2e-2, rtol=0)
    with pytest.raises(ValueError, match="must have vectors, as their record exists, got none"):
        VectorFile(tmp_path, "none").load()


def test_the_study_runs_from_the_articles_to_the_tables(data, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "pretrained_model", lambda: encoder)
    monkeypatch.setattr("reproduction.documents.pretrained_model", lambda: encoder)
    monkeypatch.setattr(DocumentStudy, "presets", {"small": SMALL})
    lines: list[str] = []
    study = DocumentStudy(announce=lines.append)
    few = {
        "naive-bayes",
        "tfidf-quarters",
        "first-512",
        "mean-quarters",
        "none-place",
        "columns-place",
    }
    planned = [
        one for one in study.plan("small") if one.kind == "vectors" or one.config["row"] in few
    ]
    study.run(planned, tmp_path, preset="small", data_dir=data)
    records = Records.read(tmp_path, study.format)
    assert list(records.records) == [one.id for one in planned]
    assert len(lines) == len(planned)
    table = (tmp_path / "RESULTS.md").read_text()
    for title in ("naive Bayes", "no attention, place", "HSA, columns, place"):
        assert f"| {title} |" in table
    assert "Not finished" not in table
    tests = records.of("test", "topics")
    assert len([one for one in tests if one["config"]["row"] == "columns-place"]) == 2
    for one in tests:
        right = one["values"]["right"]
        assert one["values"]["accuracy"] == pytest.approx(right.count("1") / len(right), abs=1e-4)
    # Words alone tell the topic, and nothing of the order.
    bayes = [one for one in records.of("test") if one["config"]["row"] == "naive-bayes"]
    assert {one["task"]: one["values"]["accuracy"] for one in bayes} == {"topics": 1, "order": 0.5}


def test_test_documents_come_after_all_tries_of_a_task():
    ids = [one.id for one in DocumentStudy().plan("cpu")]
    for task in ("order", "topics"):
        tries = [at for at, name in enumerate(ids) if name.startswith(f"tune {task}")]
        tests = [at for at, name in enumerate(ids) if name.startswith(f"test {task}")]
        assert max(tries) < min(tests)
    assert {len(row.tries) for row in ROWS} == {2}


def test_a_file_is_checked_against_its_source():
    page = "<h1>A</h1><p>One &amp; two&rsquo;s. <b>Th</b>ree.<script>x</script>"
    found = check_file(page, "html")
    assert (found["misplaced"], found["words_differ"], found["saved_alike"]) == (0, 0, True)
    assert found["words_found"] == found["words_of_page"] == 4
    assert "must have some content" in check_file("", "html")["refused"]
    document = read_html("<p>One two.")
    document.values[0] = "Other"
    assert [value for value, _ in misplaced(document)] == ["Other"]
    assert json.dumps(check_file("# A\n\nOne \\* two.", "markdown"))
