"""Tokens that get far more attention than others, which a hierarchy should not pool."""

from __future__ import annotations

import torch

from polyscale.inject.attention import Attended

EDGE = 4  # tokens at each end of a text that may be sinks by their position
SINK = 5.0  # times the attention that an average token gets
SINK_IDS = 4  # token ids that may be sinks, at most


class SinkFinder:
    """Collects how much attention tokens get, by their position and by their id."""

    def __init__(self) -> None:
        # (layer, position or id) -> [attention received in units of the average, times seen]
        self.places: dict[tuple[int, int], list[float]] = {}
        self.ids: dict[tuple[int, int], list[float]] = {}
        self.causal = False
        self.tokens = 0

    @torch.no_grad()
    def __call__(self, seen: Attended) -> None:
        """Add one batch of one layer."""
        self.causal = self.causal or seen.causal
        for at in range(len(seen.query)):
            real = slice(None) if seen.real is None else seen.real[at]
            query, key = seen.query[at][:, real].float(), seen.key[at][:, real].float()
            scores = seen.scale * query @ key.mT  # [H, n, n]
            length = scores.shape[-1]
            if length < 4 * EDGE:
                continue
            average = torch.full((length, 1), 1 / length, device=scores.device)
            if seen.causal:
                later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
                scores = scores.masked_fill(later, -torch.inf)
                average = 1 / torch.arange(1, length + 1, device=scores.device)[:, None]
            share = (scores.softmax(-1) / average).mean(0)  # [n, n]
            asked = torch.full((length,), length, device=scores.device)
            if seen.causal:
                asked = torch.arange(length, 0, -1, device=scores.device)
            received = (share.sum(0) / asked).tolist()
            for place in (*range(EDGE), *range(-EDGE, 0)):
                _note(self.places, (seen.layer, place), received[place])
            if seen.tokens is not None:
                ids = seen.tokens.ids[at][real].tolist()
                self.tokens += length
                for number, amount in zip(ids[EDGE:-EDGE], received[EDGE:-EDGE], strict=True):
                    _note(self.ids, (seen.layer, number), amount)

    def found(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the positions and the token ids that some layer attends to far above average."""
        best = _best(self.places)
        places = [place for place, (amount, _) in best.items() if amount > SINK]
        if self.causal:
            prefix = 0
            while prefix < EDGE and prefix in places:
                prefix += 1
            return tuple(range(max(1, prefix))), ()
        ids = {
            number: amount
            for number, (amount, times) in _best(self.ids).items()
            # Rare ones are chance, and many of them would cost more than they help.
            if amount > SINK and times >= 8 and times <= 0.05 * self.tokens
        }
        chosen = sorted(ids, key=ids.__getitem__, reverse=True)[:SINK_IDS]
        return tuple(sorted(places, key=lambda place: (place < 0, place))), tuple(sorted(chosen))


def _note(table: dict[tuple[int, int], list[float]], key: tuple[int, int], amount: float) -> None:
    entry = table.setdefault(key, [0.0, 0])
    entry[0] += amount
    entry[1] += 1


def _best(table: dict[tuple[int, int], list[float]]) -> dict[int, tuple[float, float]]:
    """Return, over all layers, the largest mean and how often the token was seen."""
    best: dict[int, tuple[float, float]] = {}
    for (_, name), (total, times) in table.items():
        best[name] = max(best.get(name, (0.0, 0)), (total / times, times))
    return best
