"""The settings that a planner tries: the usual ones for a model, or those it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from polyscale.inject.modules import attention_layers, is_causal
from polyscale.inject.opened_settings import DENSE, DENSE_ENCODER
from polyscale.inject.workload import Continuations, Workload

WHOLE = 1 << 30  # tokens: a cache that stays whole, a prompt that is read densely
Arguments = Mapping[str, Any]
Families = dict[str, tuple[Arguments, ...]]

# Of a family the strongest settings come first: the fastest, and those that change most.
DECODERS: Families = {
    "both": (
        {"prompt": {"heavy": 128}, "cache": {"bits": (4, 2)}},
        {"prompt": {"mass": 0.9}, "cache": {"bits": (4, 4)}},
        {"prompt": {"mass": 0.95}, "cache": {"bits": (4, 4)}},
    ),
    "prompts": ({"prompt": {"mass": 0.95}, "cache": {"dense": WHOLE}},),
    "cache": (
        {"prompt": {"dense": WHOLE}, "cache": {"bits": (4, 2)}},
        {"prompt": {"dense": WHOLE}, "cache": {"bits": (4, 4)}},
    ),
}
READERS: Families = {  # decoders that write nothing, such as classifiers
    "prompts": ({"prompt": {"heavy": 128}}, {"prompt": {"mass": 0.9}}, {"prompt": {"mass": 0.95}}),
}
ENCODERS: Families = {
    "opened": (
        {"prompt": {"heavy": 64}},
        {"prompt": {"heavy": 128}},
        {"prompt": {"mass": 0.9}},
        {"prompt": {"mass": 0.95}},
    ),
    "trees": (
        {"hierarchy": (16, 16), "tie": "blocks"},
        {"hierarchy": (16, 16), "tie": "columns"},
    ),
}


def families_of(
    model: PreTrainedModel, workload: Workload, candidates: Sequence[Arguments] | None
) -> tuple[Families, list[str]]:
    """Return the settings to try by families, and notes on those that make no sense here."""
    if candidates is not None:
        return _given(candidates), []
    families, dense = dict(ENCODERS), DENSE_ENCODER
    if any(is_causal(module, model) for module in attention_layers(model)):
        families = dict(DECODERS if isinstance(workload, Continuations) else READERS)
        dense = DENSE
    longest = max(workload.read)
    if not 0 < longest <= dense:
        return families, []
    kept = {name: one for name, one in families.items() if name == "trees"}
    return kept, [
        f"opened attention was not tried: what is read at once has {longest} tokens at most, and "
        f"up to {dense} it is read densely, which is as fast"
    ]


def _given(candidates: Sequence[Arguments]) -> Families:
    if isinstance(candidates, str | Mapping) or not isinstance(candidates, Sequence):
        raise TypeError(
            "candidates must be a list of arguments of inject_opened or inject_hsa, such as "
            f"[{{'prompt': {{'heavy': 256}}}}], got {type(candidates).__name__}"
        )
    if not candidates:
        raise ValueError("candidates must be at least one, or None for the usual, got none")
    for one in candidates:
        if not isinstance(one, Mapping):
            raise TypeError(
                f"candidates must be dicts of arguments of inject_opened or inject_hsa, got {one!r}"
            )
        if "layers" in one:
            raise ValueError("candidates must be without layers, which are searched, got layers")
    return {str(number): (one,) for number, one in enumerate(candidates)}
