"""The sizes of the study: how many texts of what length, and which injections."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from polyscale.inject.settings import SENTENCES
from polyscale.training.settings import TrainingSettings
from reproduction.zero_shot.injections import EDGES, Injection, layer_sets

Tree = tuple[int, ...] | str

TREES: tuple[Tree, ...] = (
    (2, 2, 2, 2),
    (2, 4, 8, 16),
    (7, 7, 7, 7),
    (8, 4, 2),
    (16, 16),
    SENTENCES,
)
# With blocks these save over 98 % of the attention FLOPs of a layer at 512 tokens, with sinks.
CHEAP: tuple[Tree, ...] = ((2, 2, 2, 2), (2, 4, 8, 16), (4, 4, 4, 4), (4, 8, 16))
PAPER_TREE = (2, 4, 8, 16)


@dataclass(frozen=True)
class TaskSize:
    """One set of texts: how many of them, and how long."""

    name: str  # what `load_texts` takes
    title: str
    length: int  # texts are truncated to this many tokens
    train: int
    validation: int
    grid: int  # test texts on which all injections are tried
    final: int  # other test texts, for the injections that were chosen
    epochs: int
    batch_size: int
    recovery_batch: int  # samples of a step in the short fine-tuning after injection
    flops_length: int  # tokens at which the target for FLOPs is stated
    saved: float  # that target: the share that a replaced layer must save; ours for SST-2
    lost: float  # points of accuracy that the paper loses
    plan_words: int = 0  # the planner gets texts of at least this many words

    def training(self, learning_rate: float, *, bf16: bool = False) -> TrainingSettings:
        """The budget of the fine-tuning."""
        steps = max(1, self.epochs * self.train // self.batch_size)
        return TrainingSettings(
            steps=steps,
            batch_size=self.batch_size,
            learning_rate=learning_rate,
            schedule="linear",
            warmup_steps=max(1, steps // 10),
            bucket_by_length=True,
            bf16=bf16,
            evaluate_every=max(1, steps // 6),
        )


@dataclass(frozen=True)
class Preset:
    """Everything that determines the results besides the model and the seed."""

    name: str
    tasks: tuple[TaskSize, ...]
    trees: tuple[Tree, ...] = TREES
    budgets: tuple[float, ...] = (0.7, 0.5)  # for the planner: share of all attention FLOPs
    plan_texts: int = 32
    certificate_texts: int = 64
    learning_rate: float = 5e-5
    bf16: bool = False  # in fine-tuning only; measurements are in float32
    recovery_steps: int = 200
    recovery_points: int = 4  # measurements over these steps
    recovery_rate: float = 2e-5
    sentences: int = 400  # texts whose embeddings are compared
    reviews: int = 96
    review_length: int = 256
    timing_lengths: tuple[int, ...] = (64, 128, 256, 512)
    timing_batch: int = 4
    timing_rounds: int = 7

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-compatible data."""
        data = asdict(self)
        for name in ("trees", "budgets", "timing_lengths", "tasks"):
            data[name] = [list(one) if isinstance(one, tuple) else one for one in data[name]]
        return data


# Trained on phrases, tested on whole sentences: the planner should see long texts.
_SST2 = TaskSize(
    "sst2", "SST-2", 64, 12_000, 800, 372, 500, 2, 32, 32,
    flops_length=26, saved=0.50, lost=3.78, plan_words=15,
)  # fmt: skip
_AGNEWS = TaskSize(
    "agnews", "AG News", 128, 4_000, 400, 400, 2_000, 2, 32, 16,
    flops_length=128, saved=0.90, lost=0.47,
)  # fmt: skip
_IMDB = TaskSize(
    "imdb-char", "IMDB", 512, 1_600, 160, 80, 1_000, 2, 16, 4,
    flops_length=512, saved=0.98, lost=0.64,
)  # fmt: skip

PRESETS = {
    "cpu": Preset(
        "cpu",
        (_SST2, _AGNEWS, _IMDB),
        budgets=(0.7,),
        bf16=True,
        recovery_steps=100,
        recovery_points=2,
        sentences=200,
        reviews=32,
    ),
    "paper": Preset(
        "paper",
        (
            replace(_SST2, length=128, train=63_982, validation=3_367, epochs=3),
            replace(
                _AGNEWS, length=256, train=33_000, validation=3_600, grid=2_000, final=5_600,
                epochs=3,
            ),
            replace(
                _IMDB, train=22_390, validation=2_487, grid=5_000, final=20_000, epochs=3,
                batch_size=32, recovery_batch=32,
            ),
        ),
        plan_texts=128,
        certificate_texts=256,
        sentences=2_000,
        reviews=500,
    ),
    # A few minutes, to check that everything works.
    "tiny": Preset(
        "tiny",
        (
            TaskSize("sst2", "SST-2", 24, 48, 16, 16, 16, 1, 8, 8, 26, 0.50, 3.78),
            TaskSize("imdb-char", "IMDB", 32, 48, 16, 16, 16, 1, 8, 8, 512, 0.98, 0.64),
        ),
        trees=((2, 4), SENTENCES),
        budgets=(0.9,),
        plan_texts=4,
        certificate_texts=8,
        recovery_steps=4,
        recovery_points=2,
        sentences=12,
        reviews=6,
        review_length=32,
        timing_lengths=(16,),
        timing_batch=2,
        timing_rounds=2,
    ),
}  # fmt: skip


def reference_layers(count: int) -> tuple[int, ...]:
    """The layers used for comparisons: every other one of the upper half.

    >>> reference_layers(6)
    (3, 5)
    """
    return layer_sets(count)[f"alternate {count // 2 + 1}"]


def grid_injections(trees: tuple[Tree, ...], count: int) -> list[Injection]:
    """Every hierarchy and tie in every set of layers, and without sinks in the reference layers."""
    found = [
        Injection(layers, tree, tie)
        for tree in trees
        for tie in ("blocks", "columns")
        for layers in layer_sets(count).values()
    ]
    found += [
        Injection(reference_layers(count), tree, tie, sinks=())
        for tree in trees
        for tie in ("blocks", "columns")
    ]
    return found


def kinds(trees: tuple[Tree, ...]) -> list[Injection]:
    """One injection of each kind of the grid, in the first layer."""
    return [
        Injection((0,), tree, tie, sinks)
        for tree in trees
        for tie in ("blocks", "columns")
        for sinks in (EDGES, ())
    ]


def paper_injections(count: int) -> dict[str, Injection]:
    """The paper's setting and ours."""
    layers = reference_layers(count)
    return {
        "paper": Injection(layers, PAPER_TREE, "blocks", sinks=()),
        "paper with sinks": Injection(layers, PAPER_TREE, "blocks"),
        "paper with sinks, columns": Injection(layers, PAPER_TREE, "columns"),
    }


def recovery_injections(count: int) -> dict[str, Injection | None]:
    """What is fine-tuned after the injection; "none" is the control without one."""
    everywhere = tuple(range(count))
    return {
        "none": None,
        "paper": Injection(reference_layers(count), PAPER_TREE, "blocks", sinks=()),
        "all layers, blocks": Injection(everywhere, PAPER_TREE, "blocks"),
        "all layers, columns": Injection(everywhere, PAPER_TREE, "columns"),
    }
