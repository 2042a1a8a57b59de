"""Reasons drawn on the document."""

import re

import pytest
import torch

import polyscale as ps
from polyscale.models.hte.explanation import Explanation
from polyscale.report.reasons import leaf_effects, reasons_page

PAGE = "<title>No 1</title><h2>A &amp; B</h2><p onclick=x()>They <b>swim</b>.<script>y()</script>"


def model_of(documents, labels, **options):
    torch.manual_seed(0)
    processor = ps.HTEProcessor.from_documents(documents, labels, **options)
    return ps.HTEForClassification.from_processor(processor, hidden_size=16)


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return model_of([PAGE, "<p>b"], ["fish", "bird"], format="html").explain(PAGE, "fish")


def test_a_page_is_shown_as_it_is_with_its_words_marked_and_no_scripts(explanation):
    page = reasons_page(explanation)
    assert "<iframe sandbox srcdoc=" in page
    frame = re.search(r'srcdoc="(.*?)"', page)[1]
    assert "<" not in frame  # the page is a text in an attribute, and cannot leave its frame
    for word in ("swim", "They", "A"):
        assert re.search(rf"&gt;{word}&lt;/mark&gt;", frame)
    assert frame.count("&lt;mark ") == explanation.document.tree.num_rows


def test_a_mark_has_the_effect_of_the_smallest_part_that_was_left_out(explanation):
    document = explanation.document
    effects = leaf_effects(explanation)
    nodes = document.tree.row_node.tolist()
    assert effects == explanation.left_out[nodes].tolist()
    model = model_of(["One fish. A bird."], ["fish", "bird"])
    some = model.explain("One fish. A bird.", "fish", kinds=("sentence",))
    first, second = some.document.nodes("sentence")
    expected = [some.left_out[first].item()] * 2 + [some.left_out[second].item()] * 2
    assert leaf_effects(some) == expected


def test_text_is_escaped_and_a_record_has_its_fields():
    text = "A <b>fish</b> & more."
    page = reasons_page(model_of([text], ["a", "b"]).explain(text))
    assert "<b>" not in page
    assert "&lt;</" not in page.replace("&lt;/", "")
    records = [{"title": "Old <i>house", "price": 3.5}]
    page = reasons_page(model_of(records, ["a", "b"], format="record").explain(records[0]))
    assert "<i>" not in page
    assert re.search(r"<td[^>]*>price</td>", page)
    assert "By field" in page
