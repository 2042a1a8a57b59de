"""What a planner runs: texts read by a model, timed, and how its output changes."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from polyscale.inject.measure import Batch, compared, on_device

FOLLOWING = 256  # tokens that follow a prompt and are scored, at most
STEPS = 16  # of them that are decoded one at a time, for the clock
AT_ONCE = 64  # of the others, at a time
QUICK = 0.5  # seconds; a batch that takes less is timed more than once
REPEATS = 3


@dataclass(frozen=True)
class Timed:
    """The seconds of one run over all texts."""

    reading: float  # a text on average: to the first token, or the whole pass
    token: float | None = None  # each further token; None if nothing is decoded
    tokens: int = 0  # that a user wants to be written after a text

    @property
    def seconds(self) -> float:
        """Of a text, with the tokens that are written after it."""
        return self.reading + self.tokens * (self.token or 0.0)

    def least(self, other: Timed) -> Timed:
        """Return the lesser of both for each part: noise only adds."""
        token = None
        if self.token is not None and other.token is not None:
            token = min(self.token, other.token)
        return Timed(min(self.reading, other.reading), token, self.tokens)


@dataclass(frozen=True)
class Outcome:
    """What came out of a run, to be compared with another."""

    timed: Timed
    outputs: list[Tensor]


class Workload(Protocol):
    """Texts that a model reads."""

    lengths: list[int]  # tokens of each text
    read: list[int]  # those of them that are read at once

    @property
    def measure(self) -> str:
        """What `change` is, in words."""

    def run(self) -> Outcome:
        """Run the model as it is now over all texts."""

    def change(self, before: Outcome, after: Outcome) -> tuple[float, float]:
        """Return the change over all texts, and that of the text that changed most."""

    def glance(self) -> None:
        """Run the model over one text's reading, for those who watch its layers."""


class Continuations:
    """Texts of a language model: all but their last part is the prompt, and that part is scored.

    The prompt's own loss is no fair figure where later tokens help to choose what earlier ones see,
    so that it is what follows the prompt that counts: read as a user's model would read it, then
    scored from the cache that is left, the first tokens one at a time, as they would be written.
    """

    def __init__(self, model: PreTrainedModel, texts: Sequence[Tensor], new_tokens: int) -> None:
        self.model, self.new_tokens = model, new_tokens
        self.texts = [(ids[:, : -_following(ids)], ids[:, -_following(ids) :]) for ids in texts]
        self.lengths = [ids.shape[1] for ids in texts]
        self.read = [prompt.shape[1] for prompt, _ in self.texts]
        takes = inspect.signature(model.forward).parameters
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    @property
    def measure(self) -> str:
        """What the change is."""
        return "relative change of the perplexity of what follows"

    @torch.no_grad()
    def run(self) -> Outcome:
        """Run the model as it is now over all texts."""
        reading, decoding, outputs = 0.0, [], []
        for prompt, following in self.texts:
            began = time.perf_counter()
            found = self.model(prompt, use_cache=True, **self.options)
            logits = [found.logits[:, -1:]]
            reading += time.perf_counter() - began
            cache = found.past_key_values
            steps = following[:, :-1].split(1, dim=1)
            for number, part in enumerate((*steps[:STEPS], *_parts(following[:, :-1]))):
                began = time.perf_counter()
                logits.append(self.model(part, past_key_values=cache, use_cache=True).logits)
                if 0 < number < min(STEPS, len(steps)):  # the first may set up what is decoded from
                    decoding.append(time.perf_counter() - began)
            loss = F.cross_entropy(torch.cat(logits, 1)[0].float(), following[0], reduction="none")
            outputs.append(loss)
        token = sorted(decoding)[len(decoding) // 2] if decoding else 0.0
        timed = Timed(reading / len(self.texts), token, self.new_tokens)
        return Outcome(timed, outputs)

    def change(self, before: Outcome, after: Outcome) -> tuple[float, float]:
        """Return the relative change of perplexity over all texts, and the greatest of one text."""
        pairs = zip(before.outputs, after.outputs, strict=True)
        texts = [float((new - old).mean()) for old, new in pairs]
        return math.expm1(sum(texts) / len(texts)), math.expm1(max(texts))

    @torch.no_grad()
    def glance(self) -> None:
        """Read one prompt."""
        self.model(self.texts[0][0], use_cache=True, **self.options)


class Passes:
    """Batches of an encoder, a classifier, or any model that writes nothing."""

    def __init__(self, model: PreTrainedModel, batches: Sequence[Batch]) -> None:
        self.model = model
        self.batches = [on_device(batch, model) for batch in batches]
        self.labels = [batch.get("labels") for batch in batches]
        self.lengths = [length for batch in self.batches for length in _lengths(batch)]
        self.read = [max(_lengths(batch), default=0) for batch in self.batches]
        self.kind = ""

    @property
    def measure(self) -> str:
        """What the change is."""
        if self.kind == "embedding":
            return "1 - cosine of the mean hidden state"
        if self._is_labelled():
            return "relative change of the accuracy"
        return "mean KL of the logits, in nats"

    @torch.no_grad()
    def run(self) -> Outcome:
        """Run the model as it is now over all batches."""
        total, outputs = 0.0, []
        for batch in self.batches:
            times: list[float] = []
            while not times or (len(times) < REPEATS and times[0] < QUICK):
                began = time.perf_counter()
                output = self.model(**batch)
                times.append(time.perf_counter() - began)
            total += min(times)
            self.kind, found = compared(output, batch)
            outputs.append(found)
        return Outcome(Timed(total / max(1, len(self.lengths))), outputs)

    def change(self, before: Outcome, after: Outcome) -> tuple[float, float]:
        """Return the change over all texts, and the greatest of one (with labels, of a batch)."""
        pairs = list(zip(before.outputs, after.outputs, strict=True))
        if self._is_labelled():
            right = [
                [
                    (output.argmax(-1) == torch.as_tensor(labels, device=output.device)).double()
                    for labels, output in zip(self.labels, outcome.outputs, strict=True)
                ]
                for outcome in (before, after)
            ]
            accuracy, other = (torch.cat(one) for one in right)
            scale = max(float(accuracy.mean()), 1e-9)
            worst = max(float((x - y).mean()) for x, y in zip(*right, strict=True))
            return float((accuracy - other).mean()) / scale, worst / scale
        if self.kind == "embedding":
            found = [1 - F.cosine_similarity(one, two, dim=-1) for one, two in pairs]
        else:
            found = [(one.exp() * (one - two)).sum(-1).flatten() for one, two in pairs]
        all_of_them = torch.cat(found)
        return max(0.0, float(all_of_them.mean())), max(0.0, float(all_of_them.max()))

    @torch.no_grad()
    def glance(self) -> None:
        """Run the longest batch."""
        self.model(**self.batches[-1])

    def _is_labelled(self) -> bool:
        shapes = [
            isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() == 1
            for labels in self.labels
        ]
        return self.kind == "logits" and bool(shapes) and all(shapes)


def _following(ids: Tensor) -> int:
    """How many of a text's tokens follow its prompt."""
    return max(2, min(FOLLOWING, ids.shape[1] // 8))


def _parts(following: Tensor) -> tuple[Tensor, ...]:
    """The tokens that are not decoded one at a time, in parts."""
    rest = following[:, STEPS:]
    return rest.split(AT_ONCE, dim=1) if rest.shape[1] else ()


def _lengths(batch: Batch) -> list[int]:
    """Tokens of each text of a batch; of images there are none to count here."""
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return [int(count) for count in mask.sum(1)]
    if isinstance(ids, Tensor):
        return [ids.shape[1]] * len(ids)
    first = next((part for part in batch.values() if isinstance(part, Tensor)), torch.zeros(1))
    return [0] * len(first)
