import copy
import json
import random

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from polyscale.models import HTEConfig, HTEForClassification, HTEModel, collate_trees
from polyscale.trees import SignalTree
from tests.trees.strategies import random_parents

SMALL = {
    "modalities": {"default": {"vocab_size": 30}},
    "hidden_size": 16,
    "num_attention_heads": 2,
    "position_width": 8,
    "initializer_range": 0.3,
}
MIXED = {
    "modalities": {"text": {"vocab_size": 30}, "image": {"width": 12}},
    "key_names": ["title", "photo", "body"],
    "num_labels": 3,
}
ATTENTIONS = ("hierarchical", "flat", "none")


def make(model_class=HTEForClassification, **options):
    return model_class(HTEConfig(**{**SMALL, **options})).eval()


def ids(count):
    return torch.randint(0, 30, (count,))


def largest(x):
    return x.detach().abs().max().item()


def photo_record(words=3, photo=True):
    """A text and an image, with inputs for both."""
    fields = {"title": words}
    if photo:
        fields["photo"] = SignalTree.from_image(8, 8, 2)
    tree = SignalTree.from_records(fields, modalities={"title": "text", "photo": "image"})
    inputs = {"text": ids(words)}
    if photo:
        inputs["image"] = torch.randn(16, 12)
    return {"inputs": inputs, "tree": tree, "labels": words % 3}


def test_a_leaf_moves_with_its_row_not_with_its_node():
    tree = SignalTree.from_parents([-1, 0, 0, 1, 1], rows=[-1, -1, 0, 2, 1])
    ordered = SignalTree.from_parents([-1, 0, 0, 1, 1])  # rows 0 1 in the pair, 2 beside it
    model, tokens = make(), ids(3)
    expected = model(tokens[[2, 1, 0]], ordered).logits
    assert largest(model(tokens, tree).logits - expected) < 1e-5


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("tie", ["blocks", "columns"])
@pytest.mark.parametrize("local_pooling", [False, True])
def test_batched_trees_give_what_each_gives_alone(attention, tie, local_pooling):
    rng = random.Random(3)
    trees = [SignalTree.from_parents(random_parents(rng, max_leaves=20)) for _ in range(8)]
    tokens = [ids(tree.num_rows) for tree in trees]
    model = make(attention=attention, tie=tie, num_hidden_layers=3, local_pooling=local_pooling)
    together = model(torch.cat(tokens), SignalTree.batch(trees)).logits
    alone = [model(one, tree).logits for one, tree in zip(tokens, trees, strict=True)]
    assert largest(together - torch.cat(alone)) < 1e-5
    assert largest(together[0] - together[1]) > 1e-3


@pytest.mark.parametrize("pooling", ["leaves", "tree"])
@pytest.mark.parametrize("local_pooling", [False, True])
def test_a_record_with_text_and_image_in_a_batch_is_the_record_alone(local_pooling, pooling):
    examples = [photo_record(3), photo_record(5, photo=False), photo_record(1)]
    model = make(num_hidden_layers=2, local_pooling=local_pooling, pooling=pooling, **MIXED)
    batch = collate_trees(examples)
    output = model(**batch)
    assert output.logits.shape == (3, 3)
    for row, example in enumerate(examples):
        alone = model(example["inputs"], example["tree"]).logits[0]
        assert largest(output.logits[row] - alone) < 1e-5
    output.loss.backward()
    for name in ("model.embeddings.0.weight", "model.embeddings.1.weight"):
        assert largest(dict(model.named_parameters())[name].grad) > 0
    for projection in model.model.layers[0].attention.qkv_proj:
        assert largest(projection.weight.grad) > 0


@pytest.mark.parametrize("changed", ["text", "image"])
def test_every_modality_counts(changed):
    example = photo_record()
    model = make(**MIXED)
    before = model(example["inputs"], example["tree"]).logits
    other = dict(example["inputs"])
    other[changed] = (other[changed] + 1) % 30 if changed == "text" else other[changed] + 1
    assert largest(model(other, example["tree"]).logits - before) > 1e-4


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_pooled_by_the_tree_every_field_counts_alike(attention):
    # Sixteen patches and one word: of the hidden states, the word's is half of what is read.
    model = make(attention=attention, pooling="tree", **MIXED).eval()
    example = photo_record(words=1)
    hidden = model.model(example["inputs"], example["tree"]).last_hidden_state  # [17, C]
    word = int(example["tree"].modality_names.index("text"))
    rows = example["tree"].modality[example["tree"].row_node] == word
    pooled = (hidden[rows].mean(0) + hidden[~rows].mean(0)) / 2
    expected = model.classifier(pooled)
    logits = model(example["inputs"], example["tree"]).logits[0]
    assert largest(logits - expected) < 1e-6
    assert rows.sum() == 1


def test_flat_attention_is_hierarchical_attention_over_the_flat_tree():
    tree = SignalTree.from_windows(20, (3, 3))
    flat, hierarchical = make(attention="flat"), make()
    hierarchical.load_state_dict(flat.state_dict())
    tokens = ids(20)
    expected = hierarchical(tokens, tree.flatten()).logits
    assert largest(flat(tokens, tree).logits - expected) < 1e-6
    assert largest(hierarchical(tokens, tree).logits - expected) > 1e-4


def test_flat_attention_sees_the_order_of_the_leaves_and_not_the_tree():
    model, tokens = make(attention="flat"), ids(20)
    one, other = SignalTree.from_windows(20, (3, 3)), SignalTree.from_windows(20, (5,))
    assert torch.equal(model(tokens, one).logits, model(tokens, other).logits)
    assert largest(model(tokens.flip(0), one).logits - model(tokens, one).logits) > 1e-4


def test_without_attention_neither_tree_nor_order_matter():
    model, tokens = make(attention="none", num_hidden_layers=2), ids(20)
    one, other = SignalTree.from_windows(20, (3, 3)), SignalTree.from_windows(20, (5,))
    before = model(tokens, one).logits
    assert largest(model(tokens.flip(0), other).logits - before) < 1e-6
    assert not any("position" in name for name, _ in model.named_parameters())
    states = model.model(tokens, one).last_hidden_state
    changed = tokens.clone()
    changed[4] = (changed[4] + 1) % 30
    moved = (model.model(changed, one).last_hidden_state - states).abs().amax(-1) > 0
    assert moved.nonzero().flatten().tolist() == [4]


def test_local_pooling_makes_the_tree_smaller_between_layers():
    model = make(HTEModel, num_hidden_layers=3, local_pooling=True)
    tree = SignalTree.from_windows(24, (2, 3))
    output = model(ids(24), tree, output_hidden_states=True)
    assert [len(states) for states in output.hidden_states] == [24, 12, 4, 4]
    assert output.tree == SignalTree.from_windows(4)
    assert len(model(ids(24), tree, return_dict=False)) == 2


def structural_examples(count, seed=0):
    """Twins with the same leaves, whose label is whether the 1 and the 2 are in one family."""
    rng = random.Random(seed)
    examples = []
    for _ in range(count // 2):
        tokens = [rng.randint(3, 9) for _ in range(8)]
        at = rng.randint(1, 5)
        tokens[at], tokens[at + 1] = 1, 2
        for label, cut in ((1, at), (0, at + 1)):
            tree = SignalTree.from_nested([[0] * cut, [0] * (8 - cut)])
            examples.append({"inputs": tokens, "tree": tree, "labels": label})
    return examples


def trained_accuracy(attention, steps=150):
    torch.manual_seed(0)
    batch = collate_trees(structural_examples(256))
    model = make(attention=attention, initializer_range=0.1, hidden_size=32).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    test = collate_trees(structural_examples(400, seed=1))
    guess = model.eval()(test["inputs"], test["tree"]).logits.argmax(-1)
    return (guess == test["labels"]).double().mean().item()


def test_hierarchical_attention_learns_a_label_that_only_the_tree_tells():
    assert trained_accuracy("hierarchical") >= 0.95


@pytest.mark.parametrize("attention", ["flat", "none"])
def test_the_baselines_cannot_tell_trees_with_the_same_leaves_apart(attention):
    assert trained_accuracy(attention, steps=20) == 0.5


def assert_saved_and_loaded(model, folder, example):
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder).eval()
    assert list(loaded.state_dict()) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    expected = model(example["inputs"], example["tree"])[0]
    # Copied, because weights read from a file lie in memory as they lie there, and matrix
    # products of the same numbers may differ by a bit where they are aligned otherwise.
    copied = copy.deepcopy(loaded)
    assert torch.equal(copied(example["inputs"], example["tree"])[0], expected)
    return loaded


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("alpha", [1, 1.5, "learned"])
def test_a_saved_model_is_loaded_bit_for_bit(tmp_path, attention, alpha):
    model = make(
        attention=attention,
        alpha=alpha,
        num_hidden_layers=2,
        local_pooling=True,
        tie="columns",
        include_self=True,
        **MIXED,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    loaded = assert_saved_and_loaded(model, tmp_path, photo_record())
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()


def test_the_auto_classes_know_the_models(tmp_path):
    model = make(position_seed=5, num_labels=4)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "hte"
    assert isinstance(AutoConfig.from_pretrained(tmp_path), HTEConfig)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert isinstance(loaded, HTEForClassification)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, HTEModel)
    frequencies = model.model.positions.frequencies
    assert torch.equal(base.positions.frequencies, frequencies)
    assert not torch.equal(make().model.positions.frequencies, frequencies)


def test_missing_weights_start_as_in_a_new_model(tmp_path):
    make(HTEModel, alpha="learned").save_pretrained(tmp_path)
    model = HTEForClassification.from_pretrained(tmp_path)
    assert largest(model.classifier[0].bias) == 0
    new = make(alpha="learned", key_names=["a"]).model
    assert largest(new.layers[0].attention.alpha_logits) == 0
    assert 0.2 < new.positions.keys.weight.norm().item() < 3


@pytest.mark.parametrize(
    ("labels", "options", "loss"),
    [
        (torch.tensor([0, 2]), {"num_labels": 3}, torch.nn.functional.cross_entropy),
        (torch.tensor([0.5, 2.0]), {"num_labels": 1}, torch.nn.functional.mse_loss),
        (
            torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]),
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            torch.nn.functional.binary_cross_entropy_with_logits,
        ),
    ],
    ids=["classes", "numbers", "several classes"],
)
def test_the_loss_is_that_of_the_problem(labels, options, loss):
    forest = SignalTree.batch([SignalTree.from_windows(4), SignalTree.from_windows(3)])
    output = make(**options)(ids(7), forest, labels=labels)
    logits = output.logits.squeeze(-1) if options["num_labels"] == 1 else output.logits
    assert abs(output.loss - loss(logits, labels)) < 1e-6


def test_gradient_checkpointing_changes_no_gradient():
    example = photo_record()
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = make(num_hidden_layers=2, local_pooling=True, **MIXED).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(example["inputs"], example["tree"], labels=torch.tensor([1])).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(largest(gradients[0][n] - gradients[1][n]) < 1e-6 for n in gradients[0])


def test_a_model_in_bfloat16_and_one_under_autocast_stay_near_single_precision():
    example = photo_record()
    model = make(**MIXED)
    expected = model(example["inputs"], example["tree"]).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(example["inputs"], example["tree"]).logits
    half = model.bfloat16()(example["inputs"], example["tree"]).logits
    for found in (mixed, half):
        assert found.isfinite().all()
        assert largest(found.float() - expected) < 0.1 * largest(expected)


def test_the_trainer_trains_evaluates_predicts_and_saves(tmp_path):
    examples = [photo_record(words, photo=words % 2 == 0) for words in (1, 2, 3, 4, 5, 6, 7)]
    model = make(**MIXED)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        per_device_eval_batch_size=3,
        max_steps=6,
        learning_rate=1e-2,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=examples,
        eval_dataset=examples,
        data_collator=collate_trees,
        compute_metrics=lambda seen: {
            "accuracy": (seen.predictions.argmax(-1) == seen.label_ids).mean()
        },
    )
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    predicted = trainer.predict(examples)
    assert predicted.predictions.shape == (7, 3)
    assert predicted.label_ids.tolist() == [words % 3 for words in (1, 2, 3, 4, 5, 6, 7)]
    alone = model.eval()(examples[3]["inputs"], examples[3]["tree"]).logits[0]
    assert largest(torch.tensor(predicted.predictions[3]) - alone) < 1e-5
    unlabelled = [{k: v for k, v in example.items() if k != "labels"} for example in examples]
    assert trainer.predict(unlabelled).predictions.shape == (7, 3)
    trainer.save_model(str(tmp_path / "saved"))
    assert_saved_and_loaded(model.eval(), tmp_path / "saved", examples[1])


def test_padding_may_be_given_with_one_modality_and_changes_nothing():
    model, tokens = make(), ids(6)
    tree = SignalTree.from_windows(6, (2,)).prune(torch.tensor([1, 1, 0, 1, 0, 1]).bool())
    kept = tokens[[0, 1, 3, 5]]
    expected = model(kept, tree).logits
    assert torch.equal(model(tokens, tree).logits, expected)
    assert torch.equal(model({"default": tokens}, tree).logits, expected)
    batch = collate_trees([{"inputs": tokens, "tree": tree}, {"inputs": kept, "tree": tree}])
    assert batch["inputs"]["default"].tolist() == [*kept.tolist(), *kept.tolist()]
    assert "labels" not in batch


def test_graph_positions_reach_the_nodes_of_a_graph_alone_and_in_a_batch():
    model = make(num_hidden_layers=2, local_pooling=True)
    # Pooling takes nodes 3 and 4 out of the middle of those that stay.
    tree = SignalTree.from_parents([-1, 0, 0, 1, 1, 2, 2, 5, 5], domains="graph")
    examples = []
    for _ in range(2):
        places = torch.randn(tree.num_nodes, 8)
        examples.append({"inputs": ids(5), "tree": tree, "graph_positions": places})
    together = model(**collate_trees(examples)).logits
    alone = [model(**example).logits for example in examples]
    assert largest(together - torch.cat(alone)) < 1e-5
    other = {**examples[0], "graph_positions": examples[1]["graph_positions"]}
    assert largest(model(**other).logits - alone[0]) > 1e-4
    with pytest.raises(ValueError, match="graph_positions must be given"):
        model(ids(5), tree)
    with pytest.raises(ValueError, match=r"graph_positions must have shape .* got \[3, 8\]"):
        model(ids(5), tree, graph_positions=torch.randn(3, 8))
    with pytest.raises(
        ValueError, match=r"graph_positions of examples\[0\] must have .* got \[3, 8\]"
    ):
        collate_trees([{**examples[0], "graph_positions": torch.randn(3, 8)}])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "inputs must be a tensor .* got None"),
        (ids(3), r"inputs must be a dict .* \['text', 'image'\], got Tensor"),
        ({"text": ids(3)}, r"inputs must have \['image'\], .* got \['text'\]"),
        (
            {"text": ids(3), "image": torch.randn(15, 12)},
            r"inputs\['image'\] must have .* 16 leaves .* got 15",
        ),
        (
            {"text": ids(19), "image": torch.randn(16, 12)},
            r"inputs\['text'\] must have .* 3 leaves .* got 19",
        ),
        (
            {"text": ids(3), "image": torch.randn(16, 9)},
            r"must be vectors \[n, 12\], got .* \[16, 9\]",
        ),
        ({"text": torch.randn(3), "image": torch.randn(16, 12)}, "must be token ids"),
        ({"text": ids(3) + 30, "image": torch.randn(16, 12)}, "must be ids from 0 to 29, got"),
        (
            {"text": ids(3)[None], "image": torch.randn(16, 12)},
            r"inputs\['text'\] must have .* 3 leaves .* got 1",
        ),
        (
            {"text": ids(3), "image": torch.randn(16, 12), "sound": ids(2)},
            r"modalities of the tree, \['text', 'image'\], got 2 of 'sound'",
        ),
    ],
)
def test_inputs_that_do_not_fit_the_tree_are_refused_by_name(inputs, message):
    with pytest.raises(ValueError, match=message):
        make(**MIXED)(inputs, photo_record()["tree"])


def test_other_bad_arguments_are_refused_by_name():
    model, tree = make(), SignalTree.from_windows(3)
    with pytest.raises(TypeError, match="tree must be a SignalTree, got list"):
        model(ids(3), [0, 1, 2])
    with pytest.raises(TypeError, match=r"inputs\['default'\] must be a tensor, got list"):
        model([1, 2, 3], tree)
    with pytest.raises(ValueError, match=r"tree must have modalities .* got \['sound'\]"):
        model(ids(3), tree.with_modality("sound"))
    with pytest.raises(ValueError, match=r"labels must have .* 1 trees, got shape \[2\]"):
        model(ids(3), tree, labels=torch.tensor([0, 1]))
    with pytest.raises(TypeError, match=r"got \['attention_mask'\]"):
        model(ids(3), tree, attention_mask=torch.ones(3))
    with pytest.raises(ValueError, match=r"key_names .* \['a', 'b'\] not in \[\]"):
        model(ids(2), SignalTree.from_nested({"a": 1, "b": 2}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "soft"}, "attention must be one of"),
        ({"tie": "rows"}, "tie must be one of"),
        ({"pooling": "max"}, "pooling must be one of"),
        ({"attention_impl": "fast"}, "attention_impl must be one of"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"num_attention_heads": 3}, "hidden_size must be a multiple of num_attention_heads"),
        ({"intermediate_size": 0}, "intermediate_size must be None or at least 1"),
        ({"classifier_size": -1}, "classifier_size must be None or at least 1"),
        ({"position_width": 7}, "position_width must be 0 or even"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"local_pooling": True}, "local_pooling needs num_hidden_layers of at least 2"),
        ({"alpha": 0.5}, "alpha must be a number >= 1 or 'learned', got 0.5"),
        ({"alpha": "free"}, "alpha must be a number >= 1 or 'learned', got 'free'"),
        ({"modalities": {}}, "modalities must name at least one"),
        ({"modalities": {"a": {"size": 3}}}, r"modalities\['a'\] must be"),
        ({"modalities": {"a": {"width": 3, "size": 3}}}, r"modalities\['a'\] must be"),
        ({"modalities": {"a": {"width": 0}}}, r"modalities\['a'\] must be at least 1 wide"),
        ({"key_names": ["a", "a"]}, "key_names must be distinct"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(Exception, match=message) as caught:
        HTEConfig(**{**SMALL, **options})
    assert isinstance(caught.value, ValueError) or isinstance(caught.value.__cause__, ValueError)


def test_the_collator_names_the_example_that_is_wrong():
    good = photo_record()
    with pytest.raises(ValueError, match="examples must have at least one"):
        collate_trees([])
    with pytest.raises(ValueError, match=r"examples\[1\] must have 'tree'"):
        collate_trees([good, {"inputs": ids(3)}])
    with pytest.raises(ValueError, match=r"examples\[1\] must have 'labels', as others"):
        collate_trees([good, {"inputs": good["inputs"], "tree": good["tree"]}])
    with pytest.raises(ValueError, match=r"examples\[0\] must have .* got \['label'\]"):
        collate_trees([{**good, "label": 3}])
    with pytest.raises(ValueError, match=r"examples\[1\]: inputs must have \['image'\]"):
        collate_trees([good, {**good, "inputs": {"text": ids(3)}}])
    narrow = {**good["inputs"], "image": torch.randn(16, 9)}
    with pytest.raises(ValueError, match=r"inputs\['image'\] of all examples must have one width"):
        collate_trees([good, {**good, "inputs": narrow}])
