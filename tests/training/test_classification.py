import json
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from polyscale.data.listops import ListOpsConfig, collate, make_listops
from polyscale.training.classification import (
    TrainingSettings,
    _samples_seen,
    majority_rate,
    train_classifier,
)

DATA = ListOpsConfig(4, 8, 2, 6, ("MAX",), train=600, validation=100, test=100)
SETTINGS = TrainingSettings(
    steps=60, batch_size=32, learning_rate=5e-3, warmup_steps=5, log_every=10, evaluate_every=20
)


def build():
    """A tiny model of another library: the training path knows nothing of ours."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=16,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=8,
            num_labels=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def accuracy(model, split):
    batch = collate([split[index] for index in range(len(split))])
    labels = batch.pop("labels")
    with torch.no_grad():
        return (model.eval()(**batch).logits.argmax(-1) == labels).float().mean().item()


@pytest.fixture(scope="module")
def data():
    return make_listops(DATA)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield (
        train_classifier(build, data, collate, SETTINGS, output, name="tiny", progress=False),
        output,
    )
    assert torch.get_num_threads() == 1, "training must leave the number of threads alone"
    torch.set_num_threads(threads)


def test_a_small_model_learns_well_beyond_the_majority_class(run):
    result, _ = run
    assert result.test_accuracy > result.majority_rate + 0.2
    assert result.train_curve[-1].loss < 0.8 * result.train_curve[0].loss


def test_curves_have_a_point_for_every_log_and_evaluation(run):
    result, _ = run
    assert [point.step for point in result.train_curve] == [10, 20, 30, 40, 50, 60]
    assert [point.step for point in result.validation_curve] == [20, 40, 60]


def test_the_saved_model_is_the_best_on_validation_and_gives_the_reported_accuracies(run, data):
    result, output = run
    best = max(result.validation_curve, key=lambda point: point.accuracy)
    assert (result.best_step, result.validation_accuracy) == (best.step, best.accuracy)
    saved = BertForSequenceClassification.from_pretrained(output)
    assert accuracy(saved, data.validation) == pytest.approx(result.validation_accuracy)
    assert accuracy(saved, data.test) == pytest.approx(result.test_accuracy)


def test_a_run_that_gets_worse_keeps_its_earlier_state(data, tmp_path):
    class Forgetful(BertForSequenceClassification):
        """Answers 0, the rarest maximum, from its second evaluation on."""

        evaluations = 0

        def eval(self):
            self.evaluations += self.training  # repeated calls while evaluating do not count
            if self.training and self.evaluations == 2:
                torch.nn.init.zeros_(self.classifier.weight)
                self.classifier.bias.data[0] = 100.0
            return super().eval()

    settings = replace(SETTINGS, steps=40)
    result = train_classifier(
        lambda: Forgetful(build().config), data, collate, settings, tmp_path, progress=False
    )
    first, second = result.validation_curve
    assert second.accuracy < first.accuracy
    assert (result.best_step, result.validation_accuracy) == (20, first.accuracy)
    saved = BertForSequenceClassification.from_pretrained(tmp_path)
    assert accuracy(saved, data.test) == pytest.approx(result.test_accuracy)
    assert result.test_accuracy > 0.2


def test_only_a_config_and_safetensors_are_written(run):
    _, output = run
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "model.safetensors"]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(data, tmp_path):
    short = replace(SETTINGS, steps=20, evaluate_every=10)
    curves = []
    for index, seed in enumerate((0, 0, 1)):
        torch.manual_seed(index)  # what came before must not matter
        settings = replace(short, seed=seed)
        result = train_classifier(
            build, data, collate, settings, tmp_path / str(index), progress=False
        )
        curves.append(result.train_curve)
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_the_result_is_ready_for_json(run):
    result, _ = run
    loaded = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert loaded["settings"]["batch_size"] == 32
    assert loaded["model"]["hidden_size"] == 32
    assert loaded["train_curve"][0]["step"] == 10
    assert loaded["level_weights"] is None


def test_facts_of_the_run_are_counted(run):
    result, _ = run
    assert result.parameters == sum(weight.numel() for weight in build().parameters())
    assert result.threads == 1
    # Steps are a part of the whole run.
    assert 60 * 32 / result.seconds < result.samples_per_second


def test_the_small_last_batch_of_an_epoch_is_counted_as_it_is():
    settings = TrainingSettings(steps=5, batch_size=10, evaluate_every=1)
    # 25 samples: batches of 10, 10, 5, then 10, 10.
    assert _samples_seen(25, settings) == 45


def test_the_majority_rate_is_of_the_training_class_on_the_test_set():
    assert majority_rate(torch.tensor([2, 2, 1]), torch.tensor([1, 1, 1, 2])) == 0.25


def test_a_progress_bar_shows_steps_and_accuracy(data, tmp_path, capsys):
    settings = replace(SETTINGS, steps=10, evaluate_every=5, log_every=5)
    train_classifier(build, data, collate, settings, tmp_path, name="shown")
    captured = capsys.readouterr()
    assert "shown" in captured.out
    assert "10/10" in captured.out
    assert "Writing" not in captured.err


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"evaluate_every": 61}, "evaluate_every"),
    ],
)
def test_an_impossible_budget_is_refused_by_name(changes, name):
    with pytest.raises(ValueError, match=name):
        replace(SETTINGS, **changes)
