"""The sizes of the study, its rows, and what is tried for each of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TITLES = {
    "order": "Are the sections of an article in order?",
    "topics": "Topics of articles",
}
TASKS = tuple(TITLES)


@dataclass(frozen=True)
class Preset:
    """Everything that determines the results besides the encoder."""

    name: str
    words: tuple[int, int] = (500, 4000)  # of an article: at least, at most
    shares: tuple[float, float] = (0.5, 0.15)  # of the articles: training, validation; rest: test
    orders: int = 6  # of the sections of each training article; each epoch sees one
    tokens: int = 64  # of a sentence for the encoder; longer ones are divided by characters
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 10
    batch_size: int = 8
    hidden_size: int = 64
    heads: int = 4

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


PRESETS = {
    "cpu": Preset("cpu"),
    "paper": Preset("paper", words=(100, 100_000), epochs=30),
}


@dataclass(frozen=True)
class Row:
    """A line of the tables: a name, what it is made with, and two settings to choose from."""

    name: str
    title: str
    kind: str  # of `baselines.py`, or "hte"
    tries: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    tasks: tuple[str, ...] = TASKS

    def options_for(self, task: str) -> dict[str, Any]:
        """What it is made with on a task."""
        return {**self.options, **(TASK_OPTIONS[task] if self.is_trained else {})}

    @property
    def is_trained(self) -> bool:
        """Whether it depends on the seed."""
        return self.kind == "hte"


_PENALTIES = tuple({"C": value} for value in (0.01, 1.0))
_WORDS = tuple({"C": 10.0, "bigrams": bigrams} for bigrams in (False, True))
_SMOOTHING = tuple({"alpha": value} for value in (0.1, 1.0))
_RATES = tuple({"learning_rate": rate, "dropout": 0.2} for rate in (1e-3, 4e-3))


_PLACES: dict[str, Any] = {"leaf_positions": True}


def _hte(name: str, title: str, tasks: tuple[str, ...] = TASKS, **options: Any) -> Row:
    return Row(name, title, "hte", _RATES, options, tasks)


# With the default of 0.02, nothing is learnt of the order: products of content and place begin too
# small. Topics were run before that was found.
TASK_OPTIONS: dict[str, dict[str, Any]] = {"order": {"initializer_range": 0.1}, "topics": {}}

ROWS = (
    Row("naive-bayes", "naive Bayes", "bayes", _SMOOTHING, {}),
    Row("tfidf", "TF-IDF + logistic regression", "tfidf", _WORDS, {}),
    Row(
        "tfidf-quarters",
        "TF-IDF of each quarter + logistic regression",
        "tfidf",
        _WORDS,
        {"parts": 4},
        tasks=("order",),
    ),
    Row("first-512", "MiniLM, the first 512 tokens + logistic regression", "first", _PENALTIES, {}),
    Row("mean", "mean of sentence vectors + logistic regression", "mean", _PENALTIES, {}),
    Row(
        "mean-quarters",
        "means of sentence vectors of each quarter + logistic regression",
        "mean",
        _PENALTIES,
        {"parts": 4},
    ),
    _hte("none", "no attention", ("topics",), attention="none"),
    _hte("flat", "flat attention", ("topics",), attention="flat"),
    _hte("blocks", "HSA, blocks", ("topics",), tie="blocks"),
    _hte("columns", "HSA, columns", ("topics",), tie="columns"),
    _hte("shuffled", "HSA, columns, shuffled tree", ("topics",), tie="columns", tree="shuffled"),
    # The same with the places of leaves in their tree (in the flat one: their numbers).
    _hte("none-place", "no attention, place", attention="none", **_PLACES),
    _hte("flat-number", "flat attention, number", attention="flat", **_PLACES),
    _hte("columns-place", "HSA, columns, place", tie="columns", **_PLACES),
    _hte(
        "shuffled-place",
        "HSA, columns, place, shuffled tree",
        tie="columns",
        tree="shuffled",
        **_PLACES,
    ),
)
