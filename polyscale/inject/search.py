"""`plan_injection`: the search for an injection that makes a model faster, by measuring."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from polyscale.checks import check_flag, check_integer, check_number
from polyscale.inject.api import restore
from polyscale.inject.audit import opened_audit
from polyscale.inject.candidates import Arguments, Families, families_of
from polyscale.inject.measure import Certificate, watching
from polyscale.inject.modules import attention_layers
from polyscale.inject.opened import sliding_layers
from polyscale.inject.plan import (
    PAYS,
    InjectionPlan,
    Trial,
    inject_arguments,
    show_arguments,
    show_layers,
)
from polyscale.inject.records import injected_layers, injected_settings
from polyscale.inject.settings import HSASettings
from polyscale.inject.texts import workload_of
from polyscale.inject.workload import Outcome, Timed, Workload

TOLERANCE = 0.005  # the greatest change, if neither it nor a speedup is asked for
NEW_TOKENS = 128  # written after a prompt
NARROWED = 2  # settings that are tried in fewer layers, at most
HOPELESS = 4.0  # times the tolerance, from which on a layer alone is not expected to be within it
SAFETY = 0.9  # of the change that layers may add up to, which is not quite their sum


def plan_injection(
    model: PreTrainedModel,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    tolerance: float | None = None,
    speedup: float | None = None,
    candidates: Sequence[Arguments] | None = None,
    new_tokens: int = NEW_TOKENS,
    batch_size: int = 8,
    max_length: int | None = None,
    progress: bool = True,
    announce: Callable[[str], None] | None = None,
    budget: object = None,
) -> InjectionPlan:
    """Find the injection that makes a model faster on texts like these, by measuring it here.

    Settings are tried from the strongest to the weakest, in all layers and, where that changes too
    much, in those that lose least. Each trial runs the model over all texts: its seconds on this
    machine and the change of the model's output are measured. What is slower is never proposed;
    `plan.pays` says whether anything is. The model is left as it was.

    The change is, of a language model, that of the perplexity of the last part of each text, read
    after the rest as a prompt; of a model without logits, one minus the cosine of its mean hidden
    state; of batches with labels, that of the accuracy; of other logits, their mean KL.

    Args:
        model: a `PreTrainedModel`.
        texts: a list of texts (with a tokenizer), or of batches of model inputs, as long as those
            that the model is for.
        tokenizer: for texts.
        tolerance: the greatest change; the fastest injection within it is proposed. 0.005 if
            neither it nor `speedup` is given.
        speedup: how many times as fast the model is to be; without a tolerance what changes least
            is proposed.
        candidates: what to try, in place of the usual settings: arguments of `inject_opened`, such
            as `{"prompt": {"heavy": 256}}`, or of `inject_hsa`, such as `{"hierarchy": (16, 16)}`.
        new_tokens: of language models, how many tokens are written after each prompt: what a
            speedup refers to is the prompt and these.
        batch_size: texts at a time; language models read one at a time.
        max_length: tokens of a text, at most; None is what the model takes.
        progress: whether to show a bar with the time left.
        announce: called with a line for what begins and what was found.
        budget: has been removed, with an error that says so.

    >>> plan = plan_injection(model, texts, tokenizer, tolerance=0.005)  # doctest: +SKIP
    >>> print(plan)  # doctest: +SKIP
    >>> if plan.pays:  # doctest: +SKIP
    ...     plan.apply(model)
    """
    if budget is not None:
        raise TypeError(
            "budget has been removed, since fewer FLOPs did not mean less time, got "
            f"{budget!r}; use tolerance= (the greatest change of the output) or speedup= (how many "
            "times as fast)"
        )
    if tolerance is not None:
        tolerance = check_number("tolerance", tolerance, least=0)
    if speedup is not None:
        speedup = check_number("speedup", speedup, least=PAYS, hint="such as 1.5")
    if tolerance is None and speedup is None:
        tolerance = TOLERANCE
    new_tokens = check_integer("new_tokens", new_tokens, least=0)
    check_flag("progress", progress)
    count = len(attention_layers(model))
    if injected_layers(model):
        raise ValueError("model must not be injected, got one that is; restore(model) first")
    training = model.training
    model.eval()
    try:
        workload = workload_of(model, texts, tokenizer, new_tokens, batch_size, max_length)
        families, notes = families_of(model, workload, candidates)
        sliding = sliding_layers(model)
        if sliding:
            notes = [
                *notes,
                f"layers {show_layers(tuple(sliding), 0)} attend within a sliding "
                "window and are left as they are",
            ]
        layers = tuple(number for number in range(count) if number not in sliding)
        if not layers:
            families = {}
        search = _Search(model, workload, layers, tolerance, speedup)
        return search.plan(families, notes, progress, announce or (lambda line: None))
    finally:
        model.train(training)


class _Search:
    """The trials of one call of `plan_injection`."""

    def __init__(
        self,
        model: PreTrainedModel,
        workload: Workload,
        layers: tuple[int, ...],  # those that may be injected
        tolerance: float | None,
        wanted: float | None,
    ) -> None:
        self.model, self.workload, self.layers = model, workload, layers
        self.count = len(layers)
        self.tolerance, self.wanted = tolerance, wanted
        self.trials: list[Trial] = []
        self.began = time.monotonic()

    def plan(
        self,
        families: Families,
        notes: list[str],
        progress: bool,
        announce: Callable[[str], None],
    ) -> InjectionPlan:
        """Run the trials, and return what they say."""
        self.workload.glance()  # so that nothing is set up on the clock
        started = time.monotonic()
        self.before = self.workload.run()
        took = time.monotonic() - started
        self.base = self.before.timed
        most = sum(map(len, families.values()))
        most += min(NARROWED, most) + 2 if most else 0
        lengths = self.workload.lengths
        announce(
            f"{len(lengths)} texts read without an injection in {took:.1f} s; at most {most} "
            f"trials, about {most * took:.0f} s"
        )
        self.announce = announce
        self.bar = logging.tqdm(total=most, desc="planning", disable=not progress, unit="trial")
        try:
            for name, family in families.items():
                self.try_family(name, family)
            self.try_fewer_layers()
            chosen = self.confirmed()
        finally:
            self.bar.close()
        if chosen is None:
            notes = [*notes, self.why_nothing()]
        return InjectionPlan(
            model=type(self.model).__name__,
            count=len(attention_layers(self.model)),
            texts=len(lengths),
            shortest=min(lengths),
            longest=max(lengths),
            new_tokens=self.base.tokens if self.base.token is not None else None,
            measure=self.workload.measure,
            tolerance=self.tolerance,
            wanted=self.wanted,
            reading=self.base.reading,
            token=self.base.token,
            seconds=self.base.seconds,
            trials=tuple(self.trials),
            chosen=chosen,
            notes=tuple(notes),
            took=time.monotonic() - self.began,
        )

    def try_family(self, name: str, family: tuple[Arguments, ...]) -> None:
        """Try settings from the strongest to the weakest, until weaker ones cannot win."""
        for arguments in family:
            if not self.can_win(name):
                break
            trial = self.measured(arguments, self.layers)
            slow = trial.speedup < max(PAYS, self.wanted or 0.0)
            if slow or (self.wanted is None and self.fits(trial)):
                break

    def can_win(self, family: str) -> bool:
        """Whether a family can be fast enough, by what others took for its faster part."""
        reading = min([self.base.reading, *(one.reading for one in self.trials)])
        token = min([self.base.token or 0.0, *(one.token or 0.0 for one in self.trials)])
        if family == "prompts":
            token = self.base.token or 0.0
        elif family == "cache":
            reading = self.base.reading
        else:
            return True
        floor = reading + self.base.tokens * token
        best = self.best()
        if best is not None and self.tolerance is not None and floor >= best.seconds:
            return False
        return self.base.seconds / floor >= max(PAYS, self.wanted or 0.0)

    def try_fewer_layers(self) -> None:
        """Try settings that change too much in the layers that lose least by them."""
        whole = [one for one in self.trials if one.speedup >= max(PAYS, self.wanted or 0.0)]
        for trial in whole[::-1][:NARROWED]:  # the weakest are the nearest to the tolerance
            if self.tolerance is not None and not (
                self.tolerance < trial.change < HOPELESS * self.count * self.tolerance
            ):
                continue
            kl = self.kl_of_layers(trial.arguments)
            if not kl:
                continue
            order = sorted(kl, key=kl.__getitem__)
            number = self.layers_within(trial, [kl[layer] for layer in order])
            best = self.best()
            share = number / self.count
            seconds = self.base.seconds - share * (self.base.seconds - trial.seconds)
            enough = max(PAYS, self.wanted or 0.0)
            if not 0 < number < self.count or self.base.seconds / seconds < enough:
                continue
            if best is not None and self.tolerance is not None and seconds >= best.seconds:
                continue
            self.measured(trial.arguments, tuple(sorted(order[:number])))

    def layers_within(self, trial: Trial, kl: list[float]) -> int:
        """How many layers, in the order of their KL, may be injected, or have to be."""
        if self.tolerance is None:
            assert self.wanted is not None
            needed = self.base.seconds * (1 - 1 / self.wanted)
            return math.ceil(1.05 * self.count * needed / (self.base.seconds - trial.seconds))
        allowed = SAFETY * self.tolerance / trial.change * sum(kl)
        found, total = 0, 0.0
        for one in kl:
            total += one
            if total > allowed:
                break
            found += 1
        return found

    def kl_of_layers(self, arguments: Arguments) -> dict[int, float]:
        """Return the KL of each layer's attention to softmax, of all layers or of none."""
        with self.injected(self.layers, arguments):
            settings = injected_settings(self.model)[self.layers[0]]
            if not isinstance(settings, HSASettings):
                with opened_audit(self.model, every=0) as audit:
                    self.workload.glance()
                found = {one.layer: one.mean_kl for one in audit.layers}
                return {} if None in found.values() else found  # type: ignore[return-value]
        certificate = Certificate([settings])
        with watching(self.model, certificate, settings.needs_tokens):
            self.workload.glance()
        return {layer: certificate.mean_kl(0, layer) for layer in self.layers}

    @contextmanager
    def injected(self, layers: tuple[int, ...], arguments: Arguments) -> Iterator[None]:
        """Inject some layers for a while."""
        inject_arguments(self.model, layers, arguments)
        try:
            yield
        finally:
            restore(self.model)

    def measured(self, arguments: Arguments, layers: tuple[int, ...]) -> Trial:
        """Run a trial, and keep what it says."""
        self.bar.set_postfix_str(show_arguments(arguments))
        with self.injected(layers, arguments):
            outcome = self.workload.run()
        trial = self.trial(arguments, layers, outcome)
        self.trials.append(trial)
        self.bar.update()
        self.announce(
            f"{show_arguments(arguments)}, {len(layers)} layers: "
            f"{trial.speedup:.2f} times as fast, change {trial.change:.2g}"
        )
        return trial

    def trial(self, arguments: Arguments, layers: tuple[int, ...], outcome: Outcome) -> Trial:
        """Return what a run says, beside the model without an injection."""
        change, worst = self.workload.change(self.before, outcome)
        timed = outcome.timed
        return Trial(
            arguments=dict(arguments),
            layers=layers,
            reading=timed.reading,
            token=timed.token,
            seconds=timed.seconds,
            speedup=self.base.seconds / timed.seconds,
            change=change,
            worst=worst,
        )

    def fits(self, trial: Trial) -> bool:
        """Whether a trial is what was asked for, and faster."""
        within = self.tolerance is None or trial.change <= self.tolerance
        return within and trial.speedup >= max(PAYS, self.wanted or 0.0)

    def best(self) -> Trial | None:
        """The trial to propose, by what is known so far."""
        fitting = [one for one in self.trials if self.fits(one)]
        if self.tolerance is None:
            return min(fitting, key=lambda one: (one.change, one.seconds), default=None)
        return min(fitting, key=lambda one: one.seconds, default=None)

    def confirmed(self) -> int | None:
        """Return the number of the best trial after it was timed once more, beside the model."""
        for _ in range(2):
            best = self.best()
            if best is None:
                return None
            number = self.trials.index(best)
            base = self.workload.run().timed
            with self.injected(best.layers, best.arguments):
                again = self.workload.run().timed
            self.bar.update(2)
            first = Timed(best.reading, best.token, again.tokens)
            self.rebase(self.base.least(base))
            self.trials[number] = self.retimed(self.trials[number], first.least(again))
            if self.best() is self.trials[number]:
                return number
        best = self.best()
        return None if best is None else self.trials.index(best)

    def rebase(self, base: Timed) -> None:
        """Take another time of the model as it is."""
        self.base = base
        self.trials = [replace(one, speedup=base.seconds / one.seconds) for one in self.trials]

    def retimed(self, trial: Trial, timed: Timed) -> Trial:
        """Return a trial with another time."""
        return replace(
            trial,
            reading=timed.reading,
            token=timed.token,
            seconds=timed.seconds,
            speedup=self.base.seconds / timed.seconds,
        )

    def why_nothing(self) -> str:
        """Say why nothing is proposed."""
        if not self.trials:
            return "nothing pays: there was nothing to try on texts of these lengths"
        fastest = max(self.trials, key=lambda one: one.speedup)
        if fastest.speedup < max(PAYS, self.wanted or 0.0):
            return (
                f"nothing pays: the fastest injection is {fastest.speedup:.2f} times as fast on "
                "these texts; longer ones gain more"
            )
        enough = max(PAYS, self.wanted or 0.0)
        least = min(one.change for one in self.trials if one.speedup >= enough)
        return (
            f"nothing pays: what is fast enough changes the output by {least:.2g} or more; the "
            f"tolerance is {self.tolerance}"
        )
