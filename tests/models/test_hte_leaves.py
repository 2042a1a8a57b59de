"""Leaves from pretrained vectors and encoders, and HTE models in the habits of Hugging Face."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, pipeline

import polyscale as ps
from polyscale.models.hte.embedding import LeafPlaces
from polyscale.models.hte.inputs import prune_inputs
from polyscale.models.hte.processing import _vocabulary

PAGES = [
    "<title>No 1</title><h2>Life</h2><p>They swim. It is good.<img src=a.png>"
    "<h2>Food</h2>They eat.",
    "<title>No 2</title><h2>Life</h2><p>They fly. It is good.<h2>Food</h2><p>They sing.",
]
LABELS = ["fish", "bird"]
SIZES = {"hidden_size": 16, "classifier_size": 16, "num_attention_heads": 2}
WORDS = ["No", "1", "2", "Life", "Food", "They", "It", "is", "swim", "fly", "."]
WORDS += ["swim.", "fly.", "good.", "eat.", "sing."]


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=40, intermediate_size=16, **sizes)).eval()


def of_sentences(encoder, documents=PAGES, labels=LABELS, *, freeze=True, **options):
    torch.manual_seed(0)
    tokenizer = _vocabulary(WORDS)
    processor = ps.HTEProcessor.from_documents(
        documents, labels, format="html", tokenizer=tokenizer, leaves="sentences", **options
    )
    return ps.HTEForClassification.from_processor(
        processor, encoder=encoder, freeze=freeze, **SIZES
    )


def train(model, documents=PAGES, labels=LABELS, steps=20):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        model(**model.processor(documents, labels)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_sentences_are_leaves_and_their_encoder_is_saved_with_the_model(encoder, tmp_path):
    model = train(of_sentences(encoder))
    document = model.processor.read(PAGES[0])
    texts = [value for value in document.values if isinstance(value, str)]
    assert texts == ["No 1", "Life", "They swim.", "It is good.", "Food", "They eat."]
    assert [document.text(node) for node in document.nodes("sentence")] == texts
    model.save_pretrained(tmp_path)
    loaded = ps.HTEForClassification.from_pretrained(tmp_path)
    assert [answer["label"] for answer in loaded.predict(PAGES)] == LABELS
    for one, other in zip(loaded.predict(PAGES), model.predict(PAGES), strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-6)
    assert loaded.encode(PAGES, level="sentence")[1].vectors.shape == (6, 16)


@pytest.mark.parametrize("freeze", [True, False])
def test_an_encoder_is_trained_only_if_it_is_not_frozen(encoder, freeze, tmp_path):
    model = of_sentences(encoder, freeze=freeze)
    before = encoder.state_dict()
    train(model, steps=2).save_pretrained(tmp_path)
    after = model.model.encoder.encoder.state_dict()
    name = "encoder.layer.0.attention.self.value.weight"
    assert torch.equal(before[name], after[name]) == freeze
    assert model.model.encoder.encoder.training != freeze
    loaded = ps.HTEForClassification.from_pretrained(tmp_path)
    trained = [p.requires_grad for p in loaded.model.encoder.parameters()]
    assert trained == [not freeze] * len(trained)


def test_leaves_encoded_in_advance_give_the_same_answers(encoder):
    model = of_sentences(encoder)
    examples = [model.processor.example(page) for page in PAGES]
    encoded = model.encode_leaves(examples)
    assert encoded[0]["inputs"]["text"].shape == (6, 8)
    model.eval()
    expected = model(**ps.collate_trees(examples)).logits
    torch.testing.assert_close(model(**ps.collate_trees(encoded)).logits, expected)
    trained = of_sentences(encoder, freeze=False)
    trained.encode_leaves(examples)
    assert trained.model.encoder.training
    with pytest.raises(ValueError, match="encoder must be that of the leaves, got None"):
        ps.HTEForClassification(ps.HTEConfig()).encode_leaves(examples)


def test_the_vector_of_a_sentence_does_not_depend_on_the_others(encoder):
    leaves = of_sentences(encoder).model.encoder
    rows = torch.tensor([[3, 4, 5, 6], [7, 8, -1, -1], [9, -1, -1, -1]])
    together = leaves(rows)
    assert leaves(rows[:0]).shape == (0, 8)
    for row, vector in zip(rows, together, strict=True):
        alone = row[row >= 0]
        torch.testing.assert_close(leaves(alone[None])[0], vector)
        hidden = encoder(input_ids=alone[None]).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, hidden / hidden.norm() * 8**0.5)


def test_nothing_of_a_long_document_is_cut_off(encoder):
    page = "<p>" + "They swim " * 2000 + ". " + "It is good. " * 500
    model = of_sentences(encoder, [page, PAGES[1]], max_characters=100)
    document = model.processor.read(page)
    assert max(len(value) for value in document.values) <= 100
    assert " ".join(document.values).split() == page[3:].replace(" . ", " ").split()
    longest = model.processor.example(page)["inputs"]["text"].shape[1]
    assert longest <= encoder.config.max_position_embeddings
    model.processor.max_characters = 10_000
    with pytest.warns(UserWarning, match=r"\d+ of \d+ sentences have more than the 512 tokens"):
        model.processor.example(page)
    model.processor.max_characters = 100
    whole = page + "They sing."
    logits = model.eval()(**model.processor([page, whole])).logits
    assert not torch.equal(logits[0], logits[1])


def test_words_have_pretrained_vectors_that_stay_as_they_are(tmp_path):
    torch.manual_seed(0)
    vectors = {"swim": [1.0, 0.0, 0.0], "fly": [0.0, 1.0, 0.0], "other": [0.0, 0.0, 1.0]}
    processor = ps.HTEProcessor.from_documents(PAGES, LABELS, format="html")
    model = ps.HTEForClassification.from_processor(processor, vectors=vectors, **SIZES)
    train(model).save_pretrained(tmp_path)
    loaded = ps.HTEForClassification.from_pretrained(tmp_path)
    assert [answer["label"] for answer in loaded.predict(PAGES)] == LABELS
    table = loaded.model.embeddings[loaded.config.modality_names.index("text")].table.weight
    ids = processor.tokenizer.convert_tokens_to_ids(["swim", "fly", "they"])
    assert table[ids].tolist() == [vectors["swim"], vectors["fly"], [0.0, 0.0, 0.0]]
    assert not table.requires_grad


def test_what_does_not_fit_the_leaves_is_refused(encoder):
    processor = ps.HTEProcessor.from_documents(PAGES, LABELS, format="html")
    with pytest.raises(ValueError, match="vectors must have words of the processor"):
        ps.HTEForClassification.from_processor(processor, vectors={"none": [1.0]})
    with pytest.raises(ValueError, match="encoder must be the configuration of an encoder if"):
        ps.HTEForClassification.from_processor(processor, encoder=encoder)
    with pytest.raises(ValueError, match="encoder must be the configuration of an encoder if"):
        of_sentences(None)
    with pytest.raises(ValueError, match="leaves must be 'words' or 'tokens' for format='python'"):
        ps.HTEProcessor(_vocabulary(WORDS), format="python", leaves="sentences")
    expected = r"modalities\['text'\] must be {'width': 8}"
    with pytest.raises(StrictDataclassClassValidationError, match=expected):
        ps.HTEConfig(encoder={"model_type": "bert", "hidden_size": 8})


def test_a_saved_model_runs_in_a_pipeline(encoder, tmp_path):
    model = train(of_sentences(encoder))
    model.save_pretrained(tmp_path)
    classify = pipeline("document-classification", model=str(tmp_path))
    assert classify(PAGES[0])["label"] == "fish"
    assert [answer["label"] for answer in classify(PAGES)] == LABELS
    record = {"title": "Old house", "price": 3.5}
    processor = ps.HTEProcessor.from_documents([record], format="record", problem_type="regression")
    valued = ps.HTEForClassification.from_processor(processor, **SIZES)
    (expected,) = valued.predict([record])
    assert pipeline("document-classification", model=valued)(record) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("single_label_classification", LABELS),
        ("multi_label_classification", [["fish", "small"], ["bird"]]),
        ("regression", [1.0, -1.0]),
    ],
)
def test_trainer_trains_on_documents(problem, labels, tmp_path):
    torch.manual_seed(0)
    processor = ps.HTEProcessor.from_documents(PAGES, labels, format="html", problem_type=problem)
    model = ps.HTEForClassification.from_processor(processor, **SIZES)
    rows = [
        {**processor.example(page), "labels": processor.label(label)}
        for page, label in zip(PAGES, labels, strict=True)
    ]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=30,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=rows, data_collator=ps.collate_trees).train()
    model.save_pretrained(tmp_path / "model")
    answers = ps.HTEForClassification.from_pretrained(tmp_path / "model").predict(PAGES)
    if problem == "regression":
        assert [answer["value"] for answer in answers] == pytest.approx(labels, abs=0.3)
    else:
        key = "labels" if problem.startswith("multi") else "label"
        assert [answer[key] for answer in answers] == labels


def test_what_is_left_out_is_encoded_once(encoder):
    model = train(of_sentences(encoder))
    calls = []
    model.model.encoder.register_forward_hook(lambda *_: calls.append(1))
    explanation = model.explain(PAGES[0])
    assert len(calls) == 1
    document = explanation.document
    (swim,) = [n for n in document.nodes("sentence") if document.text(n) == "They swim."]
    keep = torch.ones(document.tree.num_rows, dtype=torch.bool)
    keep[document.rows(swim)] = False
    inputs, tree = prune_inputs(model.processor.example(PAGES[0])["inputs"], document.tree, keep)
    batch = ps.collate_trees([{"inputs": inputs, "tree": model.processor._known(tree)}])
    with torch.no_grad():
        without = model.eval()(**batch).logits[0, model.config.label2id["fish"]]
    left_out = explanation.logit - float(without)
    assert float(explanation.left_out[swim]) == pytest.approx(left_out, abs=1e-5)


def test_nodes_have_the_means_of_the_encoders_own_vectors(encoder):
    model = of_sentences(encoder)
    (found, _) = model.encode(PAGES, level="section", of="encoder")
    leaves = model.model.encoder(model.processor.example(PAGES[0])["inputs"]["text"])
    # "Life", "They swim.", "It is good." and an image
    torch.testing.assert_close(found.vectors[0], leaves[1:4].sum(0) / 4)
    assert model.encode(PAGES, of="encoder").shape == (2, 8)
    words = ps.HTEProcessor.from_documents(PAGES, LABELS, format="html")
    with pytest.raises(ValueError, match="encoder must be that of the leaves"):
        ps.HTEForClassification.from_processor(words, **SIZES).encode(PAGES, of="encoder")


def test_a_leaf_has_the_place_of_all_its_ancestors():
    one = ps.SignalTree.from_nested({"title": [1, 2], "body": [[3, 4], 5, [6, [7, 8]]]})
    forest = ps.SignalTree.batch([one, one])
    positions, places = torch.randn(forest.num_nodes, 4), LeafPlaces(4, 3)
    found = places(positions, forest)
    for row in range(forest.num_rows):
        node, expected = int(forest.row_node[row]), torch.zeros(3)
        while forest.parent[node] >= 0:
            expected = expected + places.maps[int(forest.depth[node]) - 1](positions[node])
            node = int(forest.parent[node])
        torch.testing.assert_close(found[row], expected)


@pytest.mark.parametrize("attention", ["hierarchical", "flat", "none"])
def test_with_places_the_order_of_sections_counts(attention):
    torch.manual_seed(0)
    tree = ps.SignalTree.from_nested([[0, 1], [2, 3]])
    ids = torch.tensor([5, 6, 7, 8])
    answers = {}
    for places in (True, False):
        config = ps.HTEConfig(attention=attention, leaf_positions=places, initializer_range=0.5)
        model = ps.HTEForClassification(config).eval()
        answers[places] = [model(ids[order], tree).logits for order in ([0, 1, 2, 3], [2, 3, 0, 1])]
    assert not torch.allclose(*answers[True], atol=1e-3)
    if attention == "none":
        torch.testing.assert_close(*answers[False])
    with pytest.raises(StrictDataclassClassValidationError, match="position_width must be at leas"):
        ps.HTEConfig(leaf_positions=True, position_width=0)
