"""The simple rows: words and vectors of whole documents, and a linear model on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyscale._extras import require
from reproduction.documents.tasks import Sample, Task

TURNS = 2  # further orders of the same sections are only slow these rows down

Predict = Callable[[Sequence[Sample]], Tensor]


def fit_baseline(
    kind: str, task: Task, vectors: dict[str, Tensor], setting: dict[str, Any], parts: int = 1
) -> Predict:
    """Fit a simple row on the training documents; returns what predicts."""
    linear: Any = require("sklearn.linear_model", "bench", "the simple rows")
    pipeline: Any = require("sklearn.pipeline", "bench", "the simple rows")
    # As many of each class as the other rows see, whose epochs differ.
    turns = range(1 if kind == "first" else min(TURNS, task.turns))
    train = [sample for turn in turns for sample in task.epoch(turn)]
    labels = [sample.label for sample in train]
    if kind in ("mean", "first"):
        preprocessing: Any = require("sklearn.preprocessing", "bench", "the simple rows")
        model = pipeline.make_pipeline(
            preprocessing.StandardScaler(),
            linear.LogisticRegression(C=setting["C"], max_iter=2000),
        )

        places = {one.number: index for index, one in enumerate(task.compared())}

        def features(samples: Sequence[Sample]) -> Any:
            if kind == "first":
                return vectors["documents"][[places[one.number] for one in samples]].numpy()
            return torch.stack([_means(one, vectors, parts) for one in samples]).numpy()

    else:
        texts: Any = require("sklearn.feature_extraction.text", "bench", "the simple rows")
        compose: Any = require("sklearn.compose", "bench", "the simple rows")
        if kind == "bayes":
            bayes: Any = require("sklearn.naive_bayes", "bench", "the simple rows")
            words = texts.CountVectorizer(min_df=2)
            last = bayes.MultinomialNB(alpha=setting["alpha"])
        else:
            grams = (1, 2) if setting["bigrams"] else (1, 1)
            words = texts.TfidfVectorizer(min_df=2, sublinear_tf=True, ngram_range=grams)
            last = linear.LogisticRegression(C=setting["C"], max_iter=2000)
        columns = [(f"part {number}", _copy(words), number) for number in range(parts)]
        model = pipeline.make_pipeline(compose.ColumnTransformer(columns), last)

        def features(samples: Sequence[Sample]) -> Any:
            import numpy

            return numpy.array([_quarters(one.text, parts) for one in samples], dtype=object)

    model.fit(features(train), labels)
    return lambda samples: torch.as_tensor(model.predict(features(samples)))


def _copy(transformer: Any) -> Any:
    return require("sklearn.base", "bench", "the simple rows").clone(transformer)


def _means(sample: Sample, vectors: dict[str, Tensor], parts: int) -> Tensor:
    """The mean vector of each part of a document, side by side."""
    rows = vectors["sentences"][sample.sentences[sample.tree.leaf_row[sample.tree.leaf_order]]]
    zeros = rows.new_zeros(rows.shape[1])
    chunks = torch.tensor_split(rows, parts)
    return torch.cat([one.mean(0) if len(one) else zeros for one in chunks])


def _quarters(text: str, parts: int) -> list[str]:
    words = text.split(" ")
    size = -(-len(words) // parts)
    return [" ".join(words[part * size : (part + 1) * size]) for part in range(parts)]
