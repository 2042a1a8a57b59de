"""A finished comparison with known numbers, made without training."""

from polyscale.report.comparison import Comparison
from polyscale.training.classification import (
    TrainingResult,
    TrainingSettings,
    TrainPoint,
    ValidationPoint,
)


def result(name, accuracy, levels):
    return TrainingResult(
        name=name,
        test_accuracy=accuracy,
        validation_accuracy=accuracy + 0.01,
        best_step=40,
        majority_rate=0.125,
        parameters=70_290,
        samples_per_second=1234.5,
        seconds=61.0,
        threads=2,
        train_curve=tuple(TrainPoint(step, 2.0 - step / 50) for step in (10, 20, 30, 40)),
        validation_curve=(ValidationPoint(20, 1.4, 0.4), ValidationPoint(40, 1.1, accuracy)),
        level_weights=[[[1 / levels] * levels] * 4] * 2,
        settings=TrainingSettings(steps=40, evaluate_every=20),
        model={"model_type": "hkt", "levels": levels},
    )


def comparison(**changes):
    values = {
        "title": "HKT & standard attention",
        "results": (result("Standard <attention>", 0.613, 1), result("HKT (3 levels)", 0.687, 3)),
        "score_flop_ratios": (1.0, 1.3125),
        "data": {"task": "ListOps", "max_length": 24},
        "example": "[MAX 2 9 ]  =  9",
        "seed": 7,
        "command": "polyscale demo --output 'my runs' --seed 7",
        "versions": {"python": "3.11", "torch": "2.13.0"},
    }
    return Comparison(**{**values, **changes})
