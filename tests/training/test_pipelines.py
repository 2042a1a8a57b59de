"""What `polyscale train` saves answers in a pipeline as it does in the task."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, pipeline

from polyscale.data.tasks import load_task
from polyscale.data.texts import load_texts
from polyscale.models import HTEConfig
from polyscale.training.config import RunConfig
from polyscale.training.run import evaluate_run, run
from tests.data.samples import make_folder
from tests.training.runs import SMALL

TEXT_TASKS = {"sst2": 12, "imdb-char": 7, "agnews": 512}  # length: most texts have 10 to 20 bytes
LANGUAGE = {
    "copy": {"length": 4, "vocab": 8, "train": 60, "validation": 8, "test": 8},
    "mqar": {"pairs": 2, "length": 16, "vocab": 16, "train": 60, "validation": 8, "test": 8},
    "enwik8": {"length": 20},
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield make_folder(tmp_path_factory.mktemp("files") / "data", patch)


def configure(task, model, options, **training):
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
    if model == "hkt":
        sizes["levels"] = 2
    training = {"steps": 4, "batch_size": 8, "learning_rate": 0.03, "evaluate_every": 4, **training}
    training |= {"warmup_steps": 1}
    return RunConfig.from_dict(
        {
            "task": task, "model": model, "task_options": options,
            "model_options": sizes, "training": training,
        }
    )  # fmt: skip


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_text_classification_answers_as_the_evaluation_does(task, data_dir, tmp_path):
    config = configure(task, "hkt", {"length": TEXT_TASKS[task]})
    result = run(config, tmp_path, data_dir=data_dir, progress=False)
    texts = load_texts(task, data_dir).test
    names = load_texts(task, data_dir).label_names
    found = pipeline("text-classification", model=str(tmp_path))(texts.texts, batch_size=4)
    answers = [names.index(each["label"]) for each in found]
    right = torch.tensor(answers) == texts.labels
    assert float(right.float().mean()) == pytest.approx(result.test["accuracy"])
    assert len(set(answers)) > 1 or 0 < result.test["accuracy"] < 1

    data = load_task(task, data_dir, length=TEXT_TASKS[task])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for index, text in enumerate(texts.texts):
        assert tokenizer(text).input_ids == data.test[index]["input_ids"].tolist()


def test_expressions_are_classified_as_the_evaluation_does(tmp_path):
    result = run(SMALL.with_values({"training.learning_rate": 0.03}), tmp_path, progress=False)
    test = load_task("listops", **SMALL.task_options).test
    classify = pipeline("text-classification", model=str(tmp_path))
    answers = [each["label"] for each in classify([test.text(i) for i in range(len(test))])]
    right = [int(answer) == int(label) for answer, label in zip(answers, test.labels, strict=True)]
    assert sum(right) / len(right) == pytest.approx(result.test["accuracy"])


@pytest.mark.parametrize("model", ["hkt", "hsa"])
@pytest.mark.parametrize("task", LANGUAGE)
def test_text_generation_answers_as_the_evaluation_does(task, model, data_dir, tmp_path):
    config = configure(task, model, LANGUAGE[task], snapshots=1)
    run(config, tmp_path, data_dir=data_dir, progress=False)
    test = load_task(task, data_dir, **LANGUAGE[task]).test
    for folder in (tmp_path, tmp_path / "snapshots" / "step-000004"):
        write = pipeline("text-generation", model=str(folder))
        for index in (0, 1, 2):
            ids, labels = test[index]["input_ids"], test[index]["labels"]
            logits = write.model(ids[None]).logits[0]
            for place in (labels != -100).nonzero().flatten().tolist()[-4:]:
                prompt = prompt_of(test, index, ids[:place])
                if prompt is None:
                    continue
                found = write(prompt, max_new_tokens=1, do_sample=False, return_tensors=True)
                written = found[0]["generated_token_ids"]
                assert written == [*ids[:place].tolist(), int(logits[place - 1].argmax())]


def prompt_of(test, index, ids):
    """The text of a prompt, or None where it ends within a letter."""
    if hasattr(test, "stream"):
        try:
            return bytes(number - 1 for number in ids.tolist()).decode()
        except UnicodeDecodeError:
            return None
    return " ".join(test.text(index).split()[: len(ids)])  # answers stand in parentheses


def test_documents_and_pixels_have_named_classes_and_no_tokenizer(data_dir, tmp_path):
    options = {"embedding": "learned"}
    run(configure("sst2-words", "hsa", options), tmp_path / "words", data_dir=data_dir)
    assert HTEConfig.from_pretrained(tmp_path / "words").label2id == {"negative": 0, "positive": 1}
    run(configure("scifar10", "standard", {}), tmp_path / "pixels", data_dir=data_dir)
    names = json.loads((tmp_path / "pixels" / "config.json").read_text())["id2label"]
    assert (len(names), names["0"], names["9"]) == (10, "airplane", "truck")
    for folder in ("words", "pixels"):
        assert not list((tmp_path / folder).glob("tokenizer*"))


def test_an_encoder_over_windows_has_the_tokenizer_too(data_dir, tmp_path):
    run(configure("sst2", "fsa", {"length": 12}), tmp_path, data_dir=data_dir, progress=False)
    assert AutoTokenizer.from_pretrained(tmp_path)("ab" * 20).input_ids == [98, 99] * 6


def test_a_run_that_an_older_version_began_gets_both_when_it_is_resumed(tmp_path):
    folder = tmp_path / "run"
    run(SMALL, folder, progress=False)
    # As it was before: a state without names, a checkpoint after it, no tokenizer.
    for path in (*folder.glob("tokenizer*"), folder / "result.json"):
        path.unlink()
    content = json.loads((folder / "config.json").read_text())
    content["id2label"] = {str(number): f"LABEL_{number}" for number in range(10)}
    content["label2id"] = {f"LABEL_{number}": number for number in range(10)}
    (folder / "config.json").write_text(json.dumps(content))
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    assert evaluate_run(old) == evaluate_run(folder)

    from polyscale.training import loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "_validate", lambda self, log: "")  # nothing better is found
        run(SMALL, folder, progress=False, resume=True)
    assert AutoTokenizer.from_pretrained(folder)("[MAX 2 9 ]").input_ids == [12, 3, 10, 15]
    assert json.loads((folder / "config.json").read_text())["id2label"]["3"] == "3"
    assert json.loads((folder / "config.json").read_text())["architectures"]
