import pytest
import torch

from polyscale.data.tasks import TREE_TASKS, load_task
from polyscale.training.builders import model_for_task
from polyscale.training.config import RunConfig, models_of_task
from polyscale.training.run import run
from tests.data.samples import accept, make_folder, write_texts

SIZES = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
ATTENTIONS = {"hsa": "hierarchical", "fsa": "flat", "deepset": "none"}


@pytest.fixture
def load(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "data", monkeypatch)
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    return lambda name, **options: load_task(name, folder, **{"embedding": "learned", **options})


@pytest.mark.parametrize("task", TREE_TASKS)
@pytest.mark.parametrize("model", ["hsa", "fsa", "deepset"])
def test_every_encoder_reads_every_tree_task(load, task, model):
    chosen = model_for_task(model, SIZES, load(task))
    network = chosen.build()
    samples = [chosen.data.train[index] for index in range(3)]
    result = network(**chosen.data.collate(samples))
    result.loss.backward()
    assert result.logits.shape == (3, chosen.data.num_labels)
    gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert network.config.attention == ATTENTIONS[model]


def test_only_hierarchical_attention_sees_the_tree(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "data", monkeypatch)
    rows = [
        {"text": f"One {i}. " + "A long dull film. " * (i % 5), "label": i % 2} for i in range(60)
    ]
    write_texts(folder, "imdb-char", train=rows)
    accept(monkeypatch, folder)
    data = {
        tree: load_task("imdb-words", folder, embedding="learned", tree=tree)
        for tree in ("semantic", "windows")
    }
    for model, differs in (("hsa", True), ("fsa", False), ("deepset", False)):
        network = model_for_task(model, SIZES, data["semantic"]).build().eval()
        for weight in network.parameters():  # large, so that attention has a say
            torch.nn.init.normal_(weight, std=0.5)
        with torch.no_grad():
            semantic, windows = (
                network(**task.collate([task.train[index] for index in range(8)])).logits
                for task in data.values()
            )
        assert torch.allclose(semantic, windows, atol=1e-4) != differs, model


def test_frozen_vectors_are_no_weights_of_the_model(load):
    learned, frozen = load("sst2-words"), load("sst2-words", embedding="word2vec", width=6)
    networks = [model_for_task("hsa", SIZES, data).build() for data in (learned, frozen)]
    words = learned.modalities["text"]["vocab_size"]
    sizes = [sum(weight.numel() for weight in network.parameters()) for network in networks]
    assert sizes[0] - sizes[1] == words * 12 - (6 * 12 + 12)


def test_encoders_read_sequences_through_windows():
    data = load_task("listops", preset="demo", train=20, validation=5, test=5)
    for model in models_of_task("listops")[2:]:
        chosen = model_for_task(model, SIZES, data)
        batch = chosen.data.collate([data.train[0], data.train[1]])
        assert chosen.build()(**batch).logits.shape == (2, 10)


def test_a_model_that_does_not_fit_the_task_is_refused(load):
    trees, language = load("coco18"), load_task("copy", train=20, validation=5, test=5)
    for model in ("standard", "hkt"):
        with pytest.raises(
            ValueError,
            match="model must be one of hsa, fsa, deepset for coco18, whose samples are trees",
        ):
            model_for_task(model, SIZES, trees)
    for model in ("fsa", "deepset"):
        with pytest.raises(
            ValueError, match="model must be one of standard, hkt, hsa for copy, a language task"
        ):
            model_for_task(model, SIZES, language)
    with pytest.raises(
        ValueError, match="attention must be 'flat' for the model 'fsa', got 'none'"
    ):
        model_for_task("fsa", {"attention": "none"}, trees)
    with pytest.raises(
        ValueError, match=r"model_options of HTEConfig must be one of .*got 'windows'"
    ):
        model_for_task("hsa", {"windows": [4]}, trees)


@pytest.mark.parametrize("model", ["hsa", "fsa", "deepset"])
def test_records_are_learnt_from_start_to_result(load, tmp_path, model):
    """The caption names the class: a few steps must be enough."""
    config = RunConfig.from_dict(
        {
            "task": "coco18",
            "model": model,
            "task_options": {"embedding": "learned", "fields": "text"},
            "model_options": SIZES | {"hidden_size": 24},
            "training": {
                "steps": 80,
                "batch_size": 16,
                "learning_rate": 2e-2,
                "warmup_steps": 5,
                "evaluate_every": 80,
            },
        }
    )
    result = run(config, tmp_path / "run", data=load("coco18", fields="text"), progress=False)
    assert result.test["accuracy"] > 0.9
    assert result.majority_rate < 0.5
    assert result.flops_per_sample > 0
