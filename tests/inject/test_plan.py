from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

import polyscale as ps
from polyscale.inject import (
    InjectionPlan,
    OpenedSettings,
    Trial,
    injected_layers,
    injected_settings,
    plan_injection,
    restore,
)
from polyscale.inject.search import _Search
from polyscale.inject.workload import Continuations, Outcome, Passes, Timed
from tests.inject.models import SIZES, bert, llama, logits, mistral, qwen2, text, vit

SMALL: dict[str, Any] = {
    "block": 8, "key_block": 4, "near": 4, "sinks": 2, "sample": 4, "dense": 0
}  # fmt: skip
MANY: dict[str, Any] = {"prompt": {**SMALL, "heavy": 32}, "cache": {"dense": 0, "near": 8}}
FEW: dict[str, Any] = {"prompt": {**SMALL, "heavy": 4}, "cache": {"dense": 0, "near": 8}}


def batches(count: int = 2, length: int = 40) -> list[dict[str, Tensor]]:
    found = []
    for seed in range(count):
        mask = torch.ones(3, length, dtype=torch.long)
        mask[1, 31:] = 0
        found.append({"input_ids": text(3, length, seed), "attention_mask": mask})
    return found


class Clockwork:
    """A workload whose seconds and changes follow from what is injected, layer by layer."""

    measure = "made up"

    def __init__(self, model: PreTrainedModel, saves: dict[int, float], costs: Any) -> None:
        self.lengths = self.read = [4000]
        self.model, self.saves, self.costs, self.runs = model, saves, costs, 0

    def run(self) -> Outcome:
        """Each injected layer takes so much off ten seconds, and adds so much of a change."""
        self.runs += 1
        seconds, change = 10.0, 0.0
        for layer, settings in injected_settings(self.model).items():
            assert isinstance(settings, OpenedSettings)
            heavy = settings.prompt["heavy"]
            seconds -= self.saves[heavy] / 3
            change += self.costs(heavy, layer)
        return Outcome(Timed(seconds), [torch.tensor(change)])

    def change(self, before: Outcome, after: Outcome) -> tuple[float, float]:
        return float(after.outputs[0]), 2 * float(after.outputs[0])

    def glance(self) -> None:
        logits(self.model, input_ids=text(1, 70), use_cache=False)


def searched(
    saves: dict[int, float], costs: Any, tolerance: float | None, wanted: float | None
) -> tuple[InjectionPlan, Clockwork]:
    torch.manual_seed(0)
    model = llama()
    workload = Clockwork(model, saves, costs)
    family = tuple({"prompt": {**SMALL, "heavy": heavy}} for heavy in saves)
    search = _Search(model, workload, (0, 1, 2), tolerance, wanted)
    plan = search.plan({"both": family}, [], False, lambda line: None)
    assert injected_layers(model) == []
    return plan, workload


def by_heavy(costs: dict[int, float]) -> Any:
    return lambda heavy, layer: costs[heavy] / 3


def chosen_heavy(plan: InjectionPlan) -> int:
    assert plan.proposal is not None
    return plan.proposal.arguments["prompt"]["heavy"]


def test_the_fastest_injection_within_the_tolerance_is_proposed_and_weaker_ones_not_run() -> None:
    saves, costs = {4: 6.0, 8: 5.0, 16: 4.0, 32: 3.0}, {4: 0.5, 8: 0.09, 16: 0.05, 32: 0.01}
    plan, _ = searched(saves, by_heavy(costs), 0.1, None)
    assert chosen_heavy(plan) == 8
    assert plan.layers == (0, 1, 2)
    assert plan.speedup == pytest.approx(2.0)
    assert plan.change == pytest.approx(0.09)
    assert 16 not in {one.arguments["prompt"]["heavy"] for one in plan.trials}


def test_with_a_speedup_what_changes_least_is_proposed() -> None:
    saves, costs = {4: 8.0, 8: 7.0, 16: 4.0, 32: 1.0}, {4: 0.5, 8: 0.09, 16: 0.05, 32: 0.01}
    plan, _ = searched(saves, by_heavy(costs), None, 1.6)
    assert chosen_heavy(plan) == 16
    assert plan.speedup >= 1.6
    # All layers at heavy 8 save more than is asked for, so fewer were tried.
    assert any(len(one.layers) < 3 for one in plan.trials)
    plan, _ = searched(saves, by_heavy(costs), 0.02, 1.6)
    assert not plan.pays
    assert "what is fast enough changes the output by 0.0" in plan.notes[-1]


def test_a_layer_that_loses_most_is_left_out_where_that_brings_the_rest_within_tolerance() -> None:
    torch.manual_seed(0)
    model = llama()
    ps.inject_opened(model, prompt={**SMALL, "heavy": 4})
    with ps.opened_audit(model) as audit:
        logits(model, input_ids=text(1, 70), use_cache=False)
    kl = {one.layer: one.mean_kl for one in audit.layers}
    total = sum(kl.values())
    # The change of a layer is as its KL: a tolerance just over the two least is kept by them.
    least = sorted(kl, key=kl.__getitem__)[:2]
    tolerance = sum(kl[layer] for layer in least) / total / 0.89
    plan, _ = searched({4: 6.0}, lambda heavy, layer: kl[layer] / total, tolerance, None)
    assert plan.layers == tuple(sorted(least))
    assert plan.change <= tolerance
    assert plan.speedup == pytest.approx(10 / 6)


def test_what_is_slower_is_never_proposed_and_it_is_said_that_nothing_pays() -> None:
    plan, workload = searched({4: -1.0, 8: -2.0}, by_heavy({4: 0.0, 8: 0.0}), 0.1, None)
    assert not plan.pays
    assert plan.speedup == 1.0
    assert len(plan.trials) == 1  # a weaker one would be slower still
    assert workload.runs == 2
    assert "nothing pays; leave it as it is" in str(plan)
    assert "0.91 times as fast" in plan.notes[-1]
    with pytest.raises(ValueError, match=r"plan must propose an injection .* nothing pays"):
        plan.apply(llama())
    barely, _ = searched({4: 0.1}, by_heavy({4: 0.0}), 0.1, None)
    assert not barely.pays


def test_a_lucky_time_is_not_believed_twice() -> None:
    class Lucky(Clockwork):
        def run(self) -> Outcome:
            outcome = super().run()
            # The first run without an injection is disturbed, and so makes all others look fast.
            return replace(outcome, timed=Timed(20.0)) if self.runs == 1 else outcome

    model = llama()
    workload = Lucky(model, {4: -0.5}, by_heavy({4: 0.0}))
    family = ({"prompt": {**SMALL, "heavy": 4}},)
    plan = _Search(model, workload, (0, 1, 2), 0.1, None).plan(
        {"both": family}, [], False, lambda line: None
    )
    assert plan.trials[0].speedup == pytest.approx(10 / 10.5)
    assert not plan.pays


@pytest.fixture(scope="module")
def decoder() -> PreTrainedModel:
    torch.manual_seed(0)
    return llama()


@pytest.fixture(scope="module")
def plan(decoder: PreTrainedModel) -> InjectionPlan:
    given = [{"input_ids": text(2, 120)}]
    return plan_injection(
        decoder, given, tolerance=1e9, candidates=[FEW, MANY], new_tokens=5, progress=False
    )


def test_a_plan_of_a_decoder_says_what_it_measured_and_leaves_the_model_alone(
    decoder: PreTrainedModel, plan: InjectionPlan
) -> None:
    assert injected_layers(decoder) == []
    assert (plan.texts, plan.shortest, plan.longest, plan.new_tokens) == (2, 120, 120, 5)
    few, many = plan.trials[:2]
    assert few.arguments == FEW
    assert abs(few.change) > abs(many.change) > 0
    assert few.worst >= few.change
    assert few.token is not None
    assert few.seconds == pytest.approx(few.reading + 5 * few.token)
    assert few.speedup == pytest.approx(plan.seconds / few.seconds)
    assert plan.measure == "relative change of the perplexity of what follows"


def test_the_change_of_a_decoder_is_that_of_what_follows_its_prompt(
    decoder: PreTrainedModel, plan: InjectionPlan
) -> None:
    ids, losses = text(2, 120), []
    for injected in (False, True):
        if injected:
            ps.inject_opened(decoder, **FEW)
        loss = 0.0
        for row in ids:  # 105 tokens are the prompt, 15 follow
            with torch.no_grad():
                output = decoder(row[None, :105])
                found = [output.logits[:, -1:]]
                for at in range(105, 119):
                    step = decoder(row[None, at : at + 1], past_key_values=output.past_key_values)
                    found.append(step.logits)
            probability = torch.cat(found, 1)[0].log_softmax(-1)
            loss -= float(probability.gather(1, row[105:, None]).mean()) / 2
        losses.append(loss)
    restore(decoder)
    expected = float(torch.tensor(losses[1] - losses[0]).double().expm1())
    assert plan.trials[0].change == pytest.approx(expected, rel=1e-4)


def test_a_text_that_is_no_worse_by_an_injection_that_opens_everything_has_no_change(
    decoder: PreTrainedModel,
) -> None:
    everything = {"prompt": {**SMALL, "heavy": 400}, "cache": {"dense": 0, "near": 400}}
    workload = Continuations(decoder, [text(1, 100)], 3)
    before = workload.run()
    ps.inject_opened(decoder, **everything)
    change, worst = workload.change(before, workload.run())
    restore(decoder)
    assert abs(change) < 1e-6
    assert worst == change


def test_a_plan_is_json_and_reads_as_a_table(plan: InjectionPlan) -> None:
    assert InjectionPlan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["version"] == 2
    trial = Trial({"cache": {"bits": (4, 2)}}, (0, 2), 1.0, 0.01, 1.05, 1.9, 0.004, 0.008)
    paid = replace(plan, trials=(trial,), chosen=0)
    again = InjectionPlan.from_json(paid.to_json())
    assert again == paid
    shown = str(paid)
    assert "1.90 times as fast, change 0.004" in shown
    assert re.search(r"\* +1 +10\.0 +1\.90 +0\.004 +0\.008  0,2 +cache\(bits=\(4, 2\)\)", shown)
    model = again.apply(llama())
    assert injected_layers(model) == [0, 2]
    with pytest.raises(ValueError, match=r"must have 3 attention layers .*, got 2"):
        again.apply(llama(num_hidden_layers=2))
    for damaged in ("{", "{}", '{"format": "polyscale.plan", "version": 2}'):
        with pytest.raises(ValueError, match="text must be"):
            InjectionPlan.from_json(damaged)
    with pytest.raises(ValueError, match="got version 1, which planned FLOPs"):
        InjectionPlan.from_json('{"format": "polyscale.plan", "version": 1}')


def test_encoders_are_planned_with_trees_and_opened_attention() -> None:
    torch.manual_seed(0)
    model = BertModel(bert().config).eval()
    opened = {"prompt": {**SMALL, "heavy": 8}}
    candidates = [opened, {"hierarchy": (4, 4), "tie": "blocks"}, {"hierarchy": (4, 4)}]
    plan = plan_injection(model, batches(), tolerance=1e-9, candidates=candidates, progress=False)
    assert plan.measure == "1 - cosine of the mean hidden state"
    assert plan.new_tokens is None
    assert all(one.token is None and 0 < one.change <= one.worst for one in plan.trials)
    assert [one.arguments for one in plan.trials if len(one.layers) == 3] == candidates
    assert not plan.pays
    assert injected_layers(model) == []
    assert "token (ms)" not in str(plan)


def test_images_labels_and_classifying_decoders_are_measured_by_what_they_put_out() -> None:
    torch.manual_seed(0)
    pixels = [{"pixel_values": torch.randn(2, 3, 24, 24).double()}]
    options: dict[str, Any] = {"tolerance": 1e9, "progress": False}
    candidates = [{"hierarchy": (3, 3)}]
    plan = plan_injection(vit(), pixels, candidates=candidates, **options)
    assert plan.measure.startswith("mean KL")
    config = BertConfig(**SIZES, num_labels=3)
    classifier = BertForSequenceClassification(config).eval()
    given = batches()
    for batch in given:  # what the model says is right, so that every change is a loss
        batch["labels"] = logits(classifier, **batch).argmax(-1)
    plan = plan_injection(classifier, given, candidates=[{"hierarchy": (2, 2)}], **options)
    assert plan.measure == "relative change of the accuracy"
    sixths = 6 * plan.trials[0].change
    assert sixths == pytest.approx(round(sixths))
    reader = LlamaForSequenceClassification(llama().config).eval()
    reader.config.pad_token_id = 0
    plan = plan_injection(
        reader, batches(), candidates=[{"prompt": {**SMALL, "heavy": 4}}], **options
    )
    assert plan.measure.startswith("mean KL")
    assert plan.trials[0].change > 0


def test_texts_too_short_for_opened_attention_are_left_to_trees_and_said_so() -> None:
    said: list[str] = []
    plan = plan_injection(bert(), batches(), progress=False, announce=said.append)
    assert all("hierarchy" in one.arguments for one in plan.trials)
    assert "40 tokens at most, and up to 384 it is read densely" in plan.notes[0]
    assert re.search(r"6 texts read .* at most \d+ trials, about \d+ s", said[0])
    assert plan.tolerance == 0.005
    nothing = plan_injection(llama(), [{"input_ids": text(1, 60)}], progress=False)
    assert nothing.trials == ()
    assert not nothing.pays
    assert "there was nothing to try" in nothing.notes[-1]


def test_layers_with_a_sliding_window_are_left_out_and_said_so() -> None:
    torch.manual_seed(0)
    types = ["full_attention", "sliding_attention", "full_attention"]
    model = qwen2(use_sliding_window=True, sliding_window=8, layer_types=types)
    given = [{"input_ids": text(1, 120)}]
    plan = plan_injection(model, given, candidates=[FEW], tolerance=1e9, progress=False)
    assert plan.count == 3
    assert {one.layers for one in plan.trials} == {(0, 2)}
    assert "layers 1 attend within a sliding window" in plan.notes[0]
    none = plan_injection(mistral(), given, candidates=[FEW], progress=False)
    assert none.trials == ()
    assert not none.pays


def test_accuracy_is_only_measured_with_labels_for_all_texts() -> None:
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)).eval()
    given = batches()
    given[0]["labels"] = torch.zeros(3, dtype=torch.long)
    workload = Passes(model, given)
    workload.run()
    assert workload.measure.startswith("mean KL")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"budget": 0.5}, TypeError, r"budget has been removed.* got 0\.5; use tolerance="),
        ({"tolerance": -1}, ValueError, "tolerance must be a finite number of at least 0, got -1"),
        ({"tolerance": "5%"}, TypeError, "tolerance must .*got '5%'"),
        ({"speedup": 1}, ValueError, "speedup must .* of at least 1.02, got 1; such as 1.5"),
        ({"new_tokens": -1}, ValueError, "new_tokens must .*got -1"),
        ({"batch_size": 0}, ValueError, "batch_size must .*got 0"),
        ({"max_length": 0}, ValueError, "max_length must .*got 0"),
        ({"progress": 1}, TypeError, "progress must be True or False, got 1"),
        ({"candidates": []}, ValueError, "candidates must be at least one"),
        ({"candidates": {"prompt": {}}}, TypeError, "candidates must be a list .*got dict"),
        ({"candidates": [3]}, TypeError, "candidates must be dicts .*got 3"),
        ({"candidates": [{"layers": [1]}]}, ValueError, "candidates must be without layers"),
        ({"candidates": [{"promt": {}}]}, TypeError, "promt"),
        ({"texts": ["a b"]}, ValueError, "tokenizer must be given for texts, got None"),
        ({"texts": "a b"}, TypeError, "texts must .*got str"),
        ({"texts": []}, TypeError, "texts must .*got list"),
        ({"texts": ["a", {}]}, TypeError, "all of one kind"),
        ({"texts": [{"pixels": 3}]}, ValueError, r"input_ids \[B, N\] .*got \['pixels'\]"),
        (
            {"texts": [{"input_ids": text(1, 9)}]},
            ValueError,
            "at least 32 tokens each, .*got one of 9",
        ),
    ],
)
def test_wrong_arguments_are_named(
    decoder: Any, arguments: dict, kind: type[Exception], message: str
) -> None:
    given = {"texts": [{"input_ids": text(1, 60)}], "progress": False, **arguments}
    with pytest.raises(kind, match=message):
        plan_injection(decoder, **given)
    assert injected_layers(decoder) == []


def test_injected_models_are_refused() -> None:
    with pytest.raises(ValueError, match="model must not be injected"):
        plan_injection(ps.inject_opened(llama()), batches(), progress=False)
