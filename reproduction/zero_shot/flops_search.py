"""`plan_by_flops`: the search for layers and a hierarchy under a budget of attention FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from polyscale.inject.api import sentence_end_ids
from polyscale.inject.measure import (
    Batch,
    Certificate,
    change,
    injected,
    make_batches,
    run,
    watch,
)
from polyscale.inject.modules import attention_layers, is_causal
from polyscale.inject.records import injected_layers
from polyscale.inject.settings import SENTENCES, SINK_QUERIES, TIES, HSASettings, whole_numbers
from polyscale.trees import SignalTree
from reproduction.zero_shot.flops_plan import FlopsPlan, Sensitivity, Step
from reproduction.zero_shot.sinks import SinkFinder

HIERARCHIES: tuple[Any, ...] = ((2, 4, 8, 16), (8, 8), (16, 16), (32,))


def plan_by_flops(
    model: PreTrainedModel,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    budget: float | None = None,
    tolerance: float | None = None,
    hierarchies: Sequence[Any] = HIERARCHIES,
    ties: Sequence[str] | None = None,
    sinks: str | Sequence[int] | None = "auto",
    sink_queries: str = "exact",
    batch_size: int = 8,
    max_length: int = 256,
    finalists: int = 2,
    width: int = 3,
) -> FlopsPlan:
    """Measure each layer's sensitivity on unlabelled texts and propose what to inject.

    Every layer is injected alone with every candidate (hierarchy and tie), and the change of the
    model's output is measured: the mean KL of its logits, or, without logits, one minus the
    cosine of its mean hidden state. The `finalists` that promise most are then searched greedily:
    layer by layer, the best of the `width` least sensitive ones, measured together. The model is
    left as it was.

    Args:
        model: a `PreTrainedModel`.
        texts: a list of texts (with a tokenizer), or of batches of model inputs.
        tokenizer: for texts, and to find sentence ends if `"sentences"` is a candidate.
        budget: stop once the attention FLOPs are at most this share of softmax attention's.
        tolerance: never change the output by more than this. With both, whichever comes first.
        hierarchies: candidates: windows or `"sentences"`.
        ties: candidates; both for encoders, `"columns"` for decoders unless given.
        sinks: `"auto"` finds the tokens that get far more attention than others, by position and
            by id; or positions; or None.
        sink_queries: as for `inject_hsa`.
        batch_size: texts at a time.
        max_length: tokens of a text, at most.
        finalists: candidates that are searched.
        width: layers that are tried at each step.

    >>> plan = plan_by_flops(model, texts, tokenizer, budget=0.6)  # doctest: +SKIP
    >>> print(plan)  # doctest: +SKIP
    >>> plan.apply(model)  # doctest: +SKIP
    """
    modules = attention_layers(model)
    causal = any(is_causal(module, model) for module in modules)
    _check_aims(budget, tolerance)
    for name, number in (("finalists", finalists), ("width", width), ("batch_size", batch_size)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, got {number!r}")
    if sink_queries not in SINK_QUERIES:
        raise ValueError(f'sink_queries must be "exact" or "tied", got {sink_queries!r}')
    if injected_layers(model):
        raise ValueError("model: is injected already; restore(model) first")
    if ties is None:
        ties = ("columns",) if causal else TIES
    batches = make_batches(texts, tokenizer, batch_size, max_length)
    training = model.training
    model.eval()
    try:
        candidates = _candidates(model, batches, tokenizer, hierarchies, ties, sinks, sink_queries)
        search = _Search(model, batches, candidates, len(modules), budget, tolerance, width)
        return search.plan(finalists)
    finally:
        model.train(training)


def _check_aims(budget: float | None, tolerance: float | None) -> None:
    if budget is None and tolerance is None:
        raise ValueError(
            "budget: pass budget (a share of attention FLOPs) or tolerance (a change), or both"
        )
    if budget is not None and not 0 < budget < 1:
        raise ValueError(f"budget must be a share between 0 and 1, got {budget!r}")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance must be a positive number, got {tolerance!r}")


def _candidates(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    tokenizer: Any,
    hierarchies: Sequence[Any],
    ties: Sequence[str],
    sinks: Any,
    sink_queries: str,
) -> list[HSASettings]:
    sink_ids: tuple[int, ...] = ()
    if isinstance(sinks, str):
        if sinks != "auto":
            raise ValueError(f'sinks must be "auto", positions, or None, got {sinks!r}')
        finder = SinkFinder()
        reads_ids = all(batch.get("input_ids") is not None for batch in batches)
        encoder = not any(is_causal(module, model) for module in attention_layers(model))
        watch(model, batches[:4], finder, tokens=reads_ids and encoder)
        sinks, sink_ids = finder.found()
    places = () if sinks is None else whole_numbers("sinks", sinks)
    found = []
    for hierarchy in hierarchies:
        if isinstance(hierarchy, SignalTree):
            raise ValueError(
                'hierarchies must be windows or "sentences", which fit any text, got a SignalTree'
            )
        ends = sentence_end_ids(tokenizer) if hierarchy == SENTENCES else ()
        for tie in ties:
            found.append(
                HSASettings(hierarchy, tie, places, sink_ids, sink_queries, sentence_ends=ends)
            )
    if not found:
        raise ValueError(
            "hierarchies must give at least one hierarchy and one tie, got no candidate"
        )
    return found


class _Search:
    """The measurements of one call of `plan_by_flops`."""

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[Batch],
        candidates: list[HSASettings],
        count: int,
        budget: float | None,
        tolerance: float | None,
        width: int,
    ) -> None:
        self.model, self.batches, self.candidates = model, batches, candidates
        self.count, self.budget, self.tolerance, self.width = count, budget, tolerance, width
        self.before = [run(model, batch) for batch in batches]
        self.certificate = Certificate(candidates)
        watch(model, batches, self.certificate, any(one.needs_tokens for one in candidates))
        self.flat = sum(self.certificate.flat.values())

    def measured(self, layers: Sequence[int], settings: HSASettings) -> float:
        """Return the change of the output with these layers injected."""
        with injected(self.model, list(layers), settings):
            return change(self.before, [run(self.model, batch) for batch in self.batches])

    def share(self, candidate: int, layers: Sequence[int]) -> float:
        """Return the attention FLOPs with these layers injected, as a share."""
        table = self.certificate
        saved = sum(table.flat[layer] - table.flops[candidate, layer] for layer in layers)
        return 1 - saved / self.flat

    def alone(self) -> list[list[Sensitivity]]:
        """Return the sensitivity of every layer to every candidate."""
        found = []
        for number, settings in enumerate(self.candidates):
            row = []
            for layer in range(self.count):
                flops = self.certificate.flops[number, layer] / self.certificate.flat[layer]
                row.append(
                    Sensitivity(
                        layer,
                        _plain(settings),
                        settings.tie,
                        self.measured([layer], settings),
                        self.certificate.mean_kl(number, layer),
                        flops,
                    )
                )
            found.append(row)
        return found

    def promise(self, candidate: int, row: list[Sensitivity]) -> tuple[float, float]:
        """Return how a candidate would do if changes added up: less is better."""
        chosen: list[int] = []
        total = 0.0
        for one in sorted(row, key=lambda one: one.change):
            if self.budget is not None and self.share(candidate, chosen) <= self.budget:
                break
            if self.tolerance is not None and total + one.change > self.tolerance:
                break
            chosen.append(one.layer)
            total += one.change
        share = self.share(candidate, chosen)
        if self.tolerance is not None:
            return max(share, self.budget or 0.0), total
        return (0.0 if share <= (self.budget or 0.0) else share), total

    def greedy(self, candidate: int, row: list[Sensitivity]) -> list[Step]:
        """Add layers one by one, each time the best of a few, measured together."""
        settings = self.candidates[candidate]
        left = [one.layer for one in sorted(row, key=lambda one: one.change)]
        steps: list[Step] = []
        chosen: list[int] = []
        while left and (self.budget is None or self.share(candidate, chosen) > self.budget):
            tried = []
            for layer in left[: self.width]:
                layers = sorted([*chosen, layer])
                known = row[layer].change if not chosen else self.measured(layers, settings)
                tried.append((known, layer))
            least, best = min(tried)
            if self.tolerance is not None and least > self.tolerance:
                break
            chosen = sorted([*chosen, best])
            left.remove(best)
            steps.append(Step(tuple(chosen), least, self.share(candidate, chosen)))
        return steps

    def plan(self, finalists: int) -> FlopsPlan:
        """Return the best plan that was measured."""
        rows = self.alone()
        order = sorted(range(len(rows)), key=lambda at: self.promise(at, rows[at]))
        paths = [(at, self.greedy(at, rows[at])) for at in order[:finalists]]
        paths = [(at, path) for at, path in paths if path]
        if not paths:
            least = min(one.change for row in rows for one in row)
            raise ValueError(
                f"tolerance must be at least {least:.3g}, the least change by any layer, "
                f"got {self.tolerance}"
            )
        if self.budget is not None and self.tolerance is None:
            reached = [(at, path) for at, path in paths if path[-1].flops <= self.budget]
            if not reached:
                lowest = min(self.share(at, range(self.count)) for at in range(len(rows)))
                raise ValueError(
                    f"budget must be at least {lowest:.3g}, what attention takes with all layers "
                    f"injected, got {self.budget}; allow more, or give coarser hierarchies"
                )
            best, path = min(reached, key=lambda one: one[1][-1].change)
        else:
            # Enough is enough: below the budget, less change counts for more.
            floor = self.budget or 0.0
            best, path = min(
                paths, key=lambda one: (max(one[1][-1].flops, floor), one[1][-1].change)
            )
        settings, last = self.candidates[best], path[-1]
        per_text = self.flat / sum(len(tensors(batch)) for batch in self.batches)
        kind = self.before[0][0]
        return FlopsPlan(
            model=type(self.model).__name__,
            count=self.count,
            layers=last.layers,
            hierarchy=_plain(settings),
            tie=settings.tie,
            sinks=settings.sinks,
            sink_ids=settings.sink_ids,
            sink_queries=settings.sink_queries,
            sentence_ends=settings.sentence_ends,
            measure="mean KL of the logits, in nats"
            if kind == "logits"
            else "1 - cosine of the mean hidden state",
            change=last.change,
            flops=last.flops,
            flops_before=round(per_text),
            flops_after=round(per_text * last.flops),
            budget=self.budget,
            tolerance=self.tolerance,
            sensitivities=tuple(one for row in rows for one in row),
            steps=tuple(path),
        )


def _plain(settings: HSASettings) -> tuple[int, ...] | str:
    """Return the hierarchy of a candidate, which is never a tree."""
    assert isinstance(settings.hierarchy, tuple | str)
    return settings.hierarchy


def tensors(batch: Batch) -> Any:
    """Return the inputs of a batch, one for each text."""
    for name in ("input_ids", "inputs_embeds", "pixel_values"):
        if batch.get(name) is not None:
            return batch[name]
    raise ValueError(f"texts: a batch takes input_ids or pixel_values, got {sorted(batch)}")
