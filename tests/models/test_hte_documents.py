"""HTEProcessor, and what HTEForClassification does with documents."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image as Pictures
from transformers import AutoProcessor

import polyscale as ps
from polyscale.models.hte.inputs import prune_inputs
from polyscale.models.hte.processing import UNKNOWN

PAGES = [
    "<title>No 1</title><h2>Life</h2><p>They swim. It is good.<h2>Food</h2><p>They eat.",
    "<title>No 2</title><h2>Life</h2><p>They fly. It is good.<h2>Food</h2><p>They sing.",
]
LABELS = ["fish", "bird"]
SIZES = {"hidden_size": 16, "classifier_size": 16, "num_attention_heads": 2}


def trained(documents, labels, steps=30, **options):
    torch.manual_seed(0)
    processor = ps.HTEProcessor.from_documents(documents, labels, **options)
    model = ps.HTEForClassification(processor.config(**SIZES))
    model.processor = processor
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(**processor(documents, labels)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def model():
    return trained(PAGES, LABELS, format="html")


def assert_equal_answers(found, expected):
    """Equal but for rounding: a batch may be summed in another order."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one["label"] == other["label"]
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-6)


def test_a_model_answers_and_is_loaded_with_its_processor(model, tmp_path):
    answers = model.predict(PAGES)
    assert [answer["label"] for answer in answers] == LABELS
    assert all(sum(answer["scores"].values()) == pytest.approx(1) for answer in answers)
    model.save_pretrained(tmp_path)
    loaded = ps.HTEForClassification.from_pretrained(tmp_path)
    assert loaded.processor.to_dict() == model.processor.to_dict()
    assert_equal_answers(loaded.predict(PAGES), answers)
    (tmp_path / "page.html").write_text(PAGES[0])
    assert_equal_answers(loaded.predict(tmp_path / "page.html"), answers[:1])


def test_a_processor_is_loaded_alone_and_a_model_without_one_says_so(model, tmp_path):
    model.processor.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    assert isinstance(AutoProcessor.from_pretrained(tmp_path), ps.HTEProcessor)
    loaded = ps.HTEProcessor.from_pretrained(tmp_path)
    assert torch.equal(loaded(PAGES)["inputs"]["text"], model.processor(PAGES)["inputs"]["text"])
    with pytest.raises(ValueError, match="processor must be set to read documents, got None"):
        ps.HTEForClassification(ps.HTEConfig(**SIZES)).predict(PAGES)


def test_unknown_words_fields_and_kinds_of_leaves_have_a_place():
    records = [{"title": "Old house"}, {"title": "New flat"}]
    model = trained(records, LABELS, steps=1, format="record")
    record = {"title": "Old xyzzy", "garden": ["big", {"pond": 3}]}
    example = model.processor.example(record)
    assert example["inputs"]["text"].tolist().count(1) == 3  # xyzzy, big, 3
    tree = example["tree"]
    assert UNKNOWN in {tree.key_names[key] for key in tree.key.tolist() if key >= 0}
    assert model.predict([record])[0]["label"] in LABELS


def test_records_have_texts_numbers_and_images():
    picture = Pictures.fromarray(np.full((20, 30, 3), 255, dtype=np.uint8))
    records = [
        {"title": "White", "price": 3.5, "photo": picture},
        {"title": "Black", "price": 100, "photo": torch.zeros(16, 16)},
    ]
    model = trained(records, LABELS, format="record", image_size=16, patch_size=8)
    assert model.config.modality_names == ("number", "pixels", "text")
    batch = model.processor(records)
    assert batch["inputs"]["pixels"].shape == (8, 192)
    torch.testing.assert_close(batch["inputs"]["pixels"][:4], torch.ones(4, 192))
    assert [answer["label"] for answer in model.predict(records)] == LABELS
    fields = model.explain(records[0]).fields()
    assert set(fields) == {"title", "price", "photo"}


def test_several_labels_and_numbers_are_predicted():
    several = [["wet", "animal"], ["animal"]]
    model = trained(
        PAGES, several, steps=60, format="html", problem_type="multi_label_classification"
    )
    assert [sorted(answer["labels"]) for answer in model.predict(PAGES)] == [
        ["animal", "wet"],
        ["animal"],
    ]
    model = trained(PAGES, [1.0, -1.0], steps=100, format="html", problem_type="regression")
    values = [answer["value"] for answer in model.predict(PAGES)]
    assert values == pytest.approx([1, -1], abs=0.3)


def test_leaves_are_the_tokens_of_any_fast_tokenizer():
    processor = ps.HTEProcessor.from_documents(
        PAGES, LABELS, format="html", tokenizer=ps.byte_tokenizer()
    )
    document = processor.read("<p>Zoé")
    assert processor.example_of(document)["inputs"]["text"].tolist() == [91, 112, 196, 170]
    assert document.text(0) == "Zoé"
    model = ps.HTEForClassification(processor.config(**SIZES))
    assert model(**processor(PAGES)).logits.shape == (2, 2)


def test_one_pass_gives_the_vectors_of_all_levels(model):
    vectors = model.encode(PAGES)
    assert vectors.shape == (2, 16)
    nodes = model.encode(PAGES, level="node")
    batch = model.processor(PAGES)
    with torch.no_grad():
        hidden = model.eval().model(**batch).last_hidden_state
    for number, found in enumerate(nodes):
        begin = batch["tree"].tree_rows[number]
        for node, vector in zip(found.nodes, found.vectors, strict=True):
            rows = begin + torch.tensor(found.document.rows(node))
            torch.testing.assert_close(vector, hidden[rows].mean(0))
        torch.testing.assert_close(found.vectors[0], vectors[number])
    sections = model.encode(PAGES, level="section")
    assert [text[:4] for text in sections[1].texts] == ["Life", "Food"]
    assert len(model.encode(PAGES, level="sentence")[0].nodes) == 6
    torch.testing.assert_close(model.encode(PAGES, batch_size=1), vectors)
    with pytest.raises(ValueError, match="level must be one of"):
        model.encode(PAGES, level="word")


def test_leaving_a_subtree_out_is_the_answer_for_the_document_without_it(model):
    explanation = model.explain(PAGES[0])
    document = explanation.document
    assert explanation.label == "fish"
    (section, _) = document.nodes("section")
    without = PAGES[0].replace("<h2>Life</h2><p>They swim. It is good.", "")
    with torch.no_grad():
        logits = model.eval()(**model.processor([without])).logits[0]
        whole = model(**model.processor(PAGES[:1])).logits[0]
    index = model.config.label2id["fish"]
    # The second section is then the first: only its position differs.
    assert float(explanation.left_out[section]) == pytest.approx(
        float(whole[index] - logits[index]), abs=0.2
    )
    assert explanation.logit == pytest.approx(float(whole[index]), abs=1e-5)


def test_gradients_agree_with_leaving_out_and_both_find_the_words_that_tell(model):
    explanation = model.explain(PAGES[0])
    assert explanation.agreement > 0.8
    document = explanation.document
    words = {document.values[document.rows(node)[0]] for node, *_ in explanation.top(4, "word")}
    assert {"swim", "eat"} <= words
    swim = document.tree.row_node[document.values.index("swim")]
    assert explanation.left_out[swim] > 0
    assert explanation.gradient[swim] > 0
    assert explanation.left_out[0].isnan()
    assert "swim +" in explanation.outline()
    some = model.explain(PAGES[0], label="bird", kinds=("sentence",))
    computed = (~some.left_out.isnan()).nonzero().flatten().tolist()
    assert {document.kinds[node] for node in computed} == {"sentence"}
    assert set(explanation.fields()) == {"title", "body"}


def test_bad_questions_are_refused(model):
    with pytest.raises(ValueError, match=r"label must be one of \['bird', 'fish'\], got 'cat'"):
        model.explain(PAGES[0], label="cat")
    with pytest.raises(ValueError, match=r"kinds must be among .* got \['verse'\]"):
        model.explain(PAGES[0], kinds=("verse",))
    with pytest.raises(TypeError, match="kinds must be a sequence of kinds, got 'word'"):
        model.explain(PAGES[0], kinds="word")
    with pytest.raises(ValueError, match=r"label must be one of .*, got 'cat'"):
        model.processor(PAGES, ["cat", "fish"])
    with pytest.raises(ValueError, match="labels must be one for each of 2 documents, got 1"):
        model.processor(PAGES, ["fish"])
    with pytest.raises(
        ValueError, match="label_names must be known to make a classifier, got None"
    ):
        ps.HTEProcessor.from_documents(PAGES, format="html").config()
    with pytest.raises(ValueError, match="format must be one of"):
        ps.HTEProcessor.from_documents(PAGES, format="pdf")


def test_inputs_are_pruned_with_their_tree_whatever_their_modalities():
    tree = ps.SignalTree.from_records([{"word": 3, "photo": 2}, {"photo": 1}])
    inputs = {"word": torch.tensor([1, 2, 3]), "photo": torch.randn(3, 4)}
    keep = torch.tensor([True, False, True, False, True, True])
    left, pruned = prune_inputs(inputs, tree, keep)
    config = ps.HTEConfig(
        modalities={"word": {"vocab_size": 5}, "photo": {"width": 4}},
        key_names=["word", "photo"],
        **SIZES,
    )
    model = ps.HTEForClassification(config).eval()
    # The same as the smaller records, except for the positions in the families.
    smaller = ps.SignalTree.from_records([{"word": 2, "photo": 1}, {"photo": 1}])
    same = {"word": torch.tensor([1, 3]), "photo": inputs["photo"][1:]}
    assert torch.equal(left["word"], same["word"])
    assert torch.equal(left["photo"], same["photo"])
    assert model(left, pruned).logits.shape == model(same, smaller).logits.shape


def test_reading_warns_of_nothing_in_ordinary_documents():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.HTEProcessor.from_documents(PAGES, format="html")(PAGES)


def test_every_format_becomes_inputs():
    sources = {
        "html": PAGES[0],
        "markdown": "# A\n\nb.",
        "json": '{"a": "b", "n": 1}',
        "python": "x = 1",
        "table": "a,b\n1,c",
        "text": "One. Two.\n\nThree.",
    }
    for name, source in sources.items():
        processor = ps.HTEProcessor.from_documents([source], ["yes", "no"], format=name)
        model = ps.HTEForClassification(processor.config(**SIZES))
        model.processor = processor
        assert model.predict([source])[0]["label"] in ("yes", "no")
