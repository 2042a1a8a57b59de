from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertModel, PreTrainedModel

from polyscale.inject import (
    attention_flops,
    inject_hsa,
    injected_layers,
    injected_settings,
    restore,
)
from polyscale.inject.measure import change, run, watch
from polyscale.trees import SignalTree
from reproduction.zero_shot.flops_plan import FlopsPlan
from reproduction.zero_shot.flops_search import plan_by_flops
from reproduction.zero_shot.sinks import SinkFinder
from tests.inject.models import bert, llama, logits, text, vit


def batches(count: int = 2, length: int = 40) -> list[dict[str, Tensor]]:
    found = []
    for seed in range(count):
        mask = torch.ones(3, length, dtype=torch.long)
        mask[1, 31:] = 0
        found.append({"input_ids": text(3, length, seed), "attention_mask": mask})
    return found


class Tokenizer:
    """A word is a token; the full stop is token 7."""

    pad_token = "pad"

    def get_vocab(self) -> dict[str, int]:
        return {".": 7}

    def __call__(self, texts: list[str], **options: Any) -> dict[str, Tensor]:
        rows = [[7 if word == "." else 8 + len(word) for word in one.split()] for one in texts]
        rows = [row[: options["max_length"]] for row in rows]
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return bert()


@pytest.fixture(scope="module")
def plan(model: PreTrainedModel) -> FlopsPlan:
    return plan_by_flops(model, batches(), budget=0.6, hierarchies=[(2, 4), (8,)])


def test_a_plan_keeps_its_budget_and_says_what_it_measured(model: Any, plan: FlopsPlan) -> None:
    assert plan.flops <= 0.6
    assert 0 < len(plan.layers) <= 3
    assert plan.flops_after == pytest.approx(plan.flops * plan.flops_before, abs=1)
    assert len(plan.sensitivities) == 2 * 2 * 3
    assert plan.steps[-1].layers == plan.layers
    assert plan.steps[-1].change == plan.change
    assert injected_layers(model) == []
    # What it says of the chosen layers together is what they do.
    before = [run(model, batch) for batch in batches()]
    applied = plan.apply(model)
    assert injected_layers(applied) == list(plan.layers)
    after = [run(applied, batch) for batch in batches()]
    assert change(before, after) == pytest.approx(plan.change, rel=1e-9)
    restore(model)


def test_the_greedy_search_is_no_worse_than_any_other_layer_of_its_first_step(
    plan: FlopsPlan,
) -> None:
    first = plan.steps[0]
    alone = [
        one for one in plan.sensitivities if one.hierarchy == plan.hierarchy and one.tie == plan.tie
    ]
    assert first.change == min(one.change for one in alone)
    assert all(one.change > 0 and one.kl > 0 and 0 < one.flops < 1 for one in alone)


def test_columns_are_certified_closer_to_softmax_than_blocks(plan: FlopsPlan) -> None:
    table = {(one.layer, one.hierarchy, one.tie): one for one in plan.sensitivities}
    for (layer, hierarchy, tie), one in table.items():
        if tie == "columns":
            assert one.kl < table[layer, hierarchy, "blocks"].kl


def test_flops_of_a_plan_are_those_of_its_texts(plan: FlopsPlan) -> None:
    softmax = (4 * attention_flops(40, 4, 8).total + 2 * attention_flops(31, 4, 8).total) * 3 / 6
    assert plan.flops_before == pytest.approx(softmax, abs=1)
    sinks = len(plan.sinks)
    one = next(one for one in plan.sensitivities if (one.hierarchy, one.tie) == ((8,), "columns"))
    found = [attention_flops(n, 4, 8, (8,), sinks=sinks).total for n in (40, 31)]
    flat = [attention_flops(n, 4, 8).total for n in (40, 31)]
    assert not plan.sink_ids
    assert one.flops == pytest.approx((2 * found[0] + found[1]) / (2 * flat[0] + flat[1]))


def test_a_plan_is_json_and_reads_as_text(plan: FlopsPlan) -> None:
    again = FlopsPlan.from_json(plan.to_json())
    assert again == plan
    assert json.loads(plan.to_json())["layers"] == list(plan.layers)
    shown = str(plan)
    assert f"{plan.saved:.1%} of the attention FLOPs" in shown
    assert "2,4, columns" in shown
    assert all(f"  {layer:>4} " in shown for layer in range(3))
    for damaged in ("{", "{}", '{"format": "polyscale.plan", "version": 1}'):
        with pytest.raises(ValueError, match="text: "):
            FlopsPlan.from_json(damaged)


def test_a_tolerance_is_never_exceeded(model: PreTrainedModel, plan: FlopsPlan) -> None:
    least = min(one.change for one in plan.sensitivities)
    options: dict[str, Any] = {"hierarchies": [(2, 4), (8,)]}
    tolerant = plan_by_flops(model, batches(), tolerance=3 * least, **options)
    assert tolerant.change <= 3 * least
    options = {"hierarchies": [(8,)], "ties": ["columns"]}
    with pytest.raises(ValueError, match="the least change by any layer, got"):
        plan_by_flops(model, batches(), tolerance=least / 2, **options)
    # With both, the search stops at whichever comes first.
    both = plan_by_flops(model, batches(), budget=0.9, tolerance=1e9, **options)
    assert len(both.layers) == 1


def test_a_budget_out_of_reach_is_refused_with_what_can_be_reached(model: Any) -> None:
    with pytest.raises(ValueError, match=r"budget must .* with all layers injected, got 0\.01"):
        plan_by_flops(model, batches(), budget=0.01, hierarchies=[(8,)], ties=["columns"])
    assert injected_layers(model) == []


def test_decoders_are_planned_with_columns_and_their_first_tokens() -> None:
    model = llama()
    plan = plan_by_flops(model, batches(), budget=0.7, hierarchies=[(4, 4), (8,)])
    assert plan.tie == "columns"
    assert plan.sinks == tuple(range(len(plan.sinks)))
    assert plan.measure.startswith("mean KL")
    assert injected_layers(plan.apply(model)) == list(plan.layers)


def test_images_and_embeddings_are_planned_too() -> None:
    pixels = [{"pixel_values": torch.randn(2, 3, 24, 24).double()}]
    plan = plan_by_flops(vit(), pixels, budget=0.8, hierarchies=[(3, 3)])
    assert plan.flops <= 0.8
    model = BertModel(bert().config).eval()
    plan = plan_by_flops(model, batches(1), budget=0.8, hierarchies=[(3, 3)], ties=["blocks"])
    assert plan.measure.startswith("1 - cosine")


def test_texts_with_a_tokenizer_can_have_sentences() -> None:
    model = bert()
    texts = ["one two three . four five . " * 6, "a bc def ghij . " * 7]
    plan = plan_by_flops(
        model, texts, Tokenizer(), budget=0.9, hierarchies=["sentences"], max_length=40
    )
    assert plan.hierarchy == "sentences"
    assert plan.sentence_ends == (7,)
    assert injected_settings(plan.apply(model))[plan.layers[0]].sentence_ends == (7,)
    decoder = llama()
    plan = plan_by_flops(decoder, texts, Tokenizer(), budget=0.9, hierarchies=["sentences"])
    assert plan.hierarchy == "sentences"


def test_sinks_are_found_where_attention_goes() -> None:
    model = bert()
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            attention = layer.attention.self
            attention.query.weight.zero_()
            attention.query.bias.fill_(3.0)
            attention.key.weight.zero_()
        # One coordinate of the embedding says that a token is to be attended to.
        words = model.get_input_embeddings().weight
        key = model.bert.encoder.layer[0].attention.self.key
        model.bert.embeddings.position_embeddings.weight.mul_(0.01)
        words[9] = 0.0
        words[9, 0] = 40.0
        key.weight[:, 0] = 2.0
    given = batches(3)
    for batch in given:
        batch["input_ids"][batch["input_ids"] == 9] = 10
        batch["input_ids"][:, 0] = 9
        batch["input_ids"][:, [14, 22]] = 9
    finder = SinkFinder()
    watch(model, given, finder, tokens=True)
    places, ids = finder.found()
    assert 0 in places
    assert ids == (9,)


def test_watching_changes_nothing() -> None:
    model, given = llama(), batches(1)
    before = logits(model, **given[0])
    seen: list[int] = []
    watch(model, given, lambda one: seen.append(one.layer), tokens=True)
    assert seen == [0, 1, 2]
    assert torch.equal(logits(model, **given[0]), before)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, ValueError, "budget: pass budget"),
        ({"budget": 1.5}, ValueError, "budget must .*got 1.5"),
        ({"tolerance": 0.0}, ValueError, "tolerance must .*got 0.0"),
        ({"budget": 0.5, "width": 0}, ValueError, "width must .*got 0"),
        ({"budget": 0.5, "sinks": "all"}, ValueError, "sinks must .*got 'all'"),
        ({"budget": 0.5, "hierarchies": []}, ValueError, "hierarchies must .*got no candidate"),
        (
            {"budget": 0.5, "hierarchies": [SignalTree.from_windows(4)]},
            ValueError,
            "got a SignalTr",
        ),
        ({"budget": 0.5, "texts": ["a b"]}, ValueError, "tokenizer must be given for texts"),
        ({"budget": 0.5, "texts": "a b"}, TypeError, "texts must .*got str"),
        ({"budget": 0.5, "texts": []}, TypeError, "texts must .*got list"),
        ({"budget": 0.5, "texts": ["a", {}]}, TypeError, "all of one kind"),
    ],
)
def test_wrong_arguments_are_named(
    model: Any, arguments: dict, kind: type[Exception], message: str
) -> None:
    given = {"texts": batches(1), **arguments}
    with pytest.raises(kind, match=message):
        plan_by_flops(model, **given)


def test_injected_models_and_models_of_other_sizes_are_refused(plan: FlopsPlan) -> None:
    with pytest.raises(ValueError, match="is injected already"):
        plan_by_flops(inject_hsa(bert()), batches(), budget=0.5)
    with pytest.raises(ValueError, match=r"must have 3 attention layers .*, got 2"):
        plan.apply(bert(num_hidden_layers=2))
