"""Runs on a user's own data: planned, trained, resumed, refused, and asked for answers."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments, pipeline
from typer.testing import CliRunner

import polyscale
from polyscale.cli import make_app
from polyscale.data.tasks import load_task
from polyscale.models import (
    HKTConfig,
    HKTForCausalLM,
    HKTForSequenceClassification,
    byte_tokenizer,
)
from polyscale.training import loop
from polyscale.training.answers import evaluate_data, generate, predict
from polyscale.training.own import plan_own_run
from polyscale.training.run import evaluate_run, read_config, run
from tests.data.own.samples import (
    as_csv,
    rows,
    write_csv,
    write_images,
    write_pages,
)

TINY = {
    "training.steps": 4,
    "training.evaluate_every": 2,
    "training.batch_size": 8,
    "training.learning_rate": 0.01,
    "model.hidden_size": 12,
    "model.num_attention_heads": 3,
}


def invoke(*arguments):
    return CliRunner().invoke(make_app(), [str(argument) for argument in arguments])


def train_tiny(folder, *arguments, **changes):
    sets = [f"--set={name}={value}" for name, value in {**TINY, **changes}.items()]
    found = invoke("train", "--preset", "tiny", "--output", folder, *sets, *arguments)
    assert found.exit_code == 0, found.output
    return found.stdout


def plan(path, changes=TINY, **options):
    task = {
        name: options.pop(name) for name in [*options] if name not in ("model", "kind", "trees")
    }
    return plan_own_run({"data": str(path), **task}, preset="tiny", changes=changes, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A table and the folders of the runs on it, by model."""
    folder = tmp_path_factory.mktemp("own")
    table = write_csv(folder / "words.csv")
    said = {
        model: train_tiny(folder / model, "--data", table, "--model", model, *more)
        for model, more in {"hkt": (), "hsa": (), "fsa": ("--trees", "windows")}.items()
    }
    return folder, table, said


def test_what_was_guessed_is_said_and_is_in_the_configuration(made):
    folder, table, said = made
    for line in (
        "- words.csv: 32 train, 4 validation, 4 test samples",
        "- texts are in the column 'text' and labels in 'label' (guessed; --text-column and "
        "--label-column choose)",
        "- 2 labels for training: sea (16), sky (16)",
        "held out 4 for validation and 4 for test, 10 % of every label (seed 0)",
        "- texts are cut to 64 bytes, because 95 % of them have at most ",
        f"Run: {folder / 'hkt'}",
    ):
        assert line in said["hkt"]
    config = read_config(folder / "hkt")
    assert config.task == "own-texts"
    assert config.task_options.pop("digest")
    assert config.task_options == {
        "data": str(table.resolve()),
        "text": ["text"],
        "label": "label",
        "length": 64,
    }
    assert read_config(folder / "hsa").task == "own-documents"
    assert read_config(folder / "fsa").task == "own-texts"


@pytest.mark.parametrize("model", ["hkt", "hsa", "fsa"])
def test_answers_agree_with_the_evaluation_of_the_run(model, made):
    folder, table, _ = made
    config = read_config(folder / model)
    result = json.loads((folder / model / "result.json").read_text())
    assert evaluate_run(folder / model) == pytest.approx(result["test"])
    own = plan(table, model=model, trees="windows" if model == "fsa" else None)
    assert own.config.task_options == config.task_options

    # The rows that were held out, as a table of their own.
    test = own.data.test
    held = [test.text(index) for index in range(len(test))]
    named = [(text, own.data.label_names[n]) for text, n in zip(held, test.labels, strict=True)]
    assert set(named) <= set(rows())
    (folder / "test.csv").write_text(as_csv([*named, ("", "sea")]))
    measured = evaluate_data(folder / model, str(folder / "test.csv"))
    assert (measured.pop("samples"), measured.pop("left_out")) == (4, 1)
    assert measured == pytest.approx(result["test"], abs=1e-6)

    answers, items = predict(folder / model, str(folder / "test.csv"), batch_size=3)
    assert [answer.item.content for answer in answers] == held
    assert len(items.left_out) == 1
    right = sum(answer.label == label for answer, (_, label) in zip(answers, named, strict=True))
    assert right / 4 == pytest.approx(result["test"]["accuracy"])
    for answer in answers:
        assert sum(answer.scores.values()) == pytest.approx(1, abs=1e-5)
        assert answer.probability == max(answer.scores.values())
        single, _ = predict(folder / model, str(answer.item.content))
        assert single[0].scores == pytest.approx(answer.scores, abs=1e-4)


def test_pipelines_answer_as_predict_does(made):
    folder, _, _ = made
    texts = [text for text, _ in rows(6)]
    for model, task in (("hkt", "text-classification"), ("hsa", "document-classification")):
        found = pipeline(task, model=str(folder / model))(texts)
        for text, one in zip(texts, found, strict=True):
            (answer,), _ = predict(folder / model, text)
            assert (one["label"], one["score"]) == (
                answer.label,
                pytest.approx(answer.probability, abs=1e-4),
            )


def test_predict_writes_a_table_and_names_what_it_leaves_out(made, tmp_path):
    folder, _, _ = made
    (tmp_path / "new.csv").write_text("label,text\nsea,a fish\n,\nsea,a bird\n")
    printed = invoke("predict", folder / "hkt", tmp_path / "new.csv")
    assert printed.exit_code == 0
    table = list(csv.DictReader(printed.stdout.splitlines()))
    assert [row["row"] for row in table] == ["line 2", "line 4"]
    assert all(row["label"] in ("sea", "sky") and float(row["probability"]) > 0 for row in table)
    assert "left out 1 of 3 rows: line 3 (empty)" in printed.stderr
    out = tmp_path / "answers.jsonl"
    assert invoke("predict", folder / "hkt", tmp_path / "new.csv", "--output", out).exit_code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["label"] for line in lines] == [row["label"] for row in table]
    assert set(lines[0]["probabilities"]) == {"sea", "sky"}
    for arguments, message in (
        (("predict", folder / "hkt", "none.csv"), "must be a file or folder that exists, got none"),
        (("predict", folder / "hkt", "a", "--output", "a.txt"), "must end with .csv or .jsonl"),
        (("predict", folder / "hkt", " "), "the text must have at least one word, got none"),
        (("generate", folder / "hkt", "a"), "must hold a language model, got the classifier"),
        (("predict", tmp_path, "a"), "must hold a trained model: config.json is missing"),
        (
            ("predict", folder / "hkt", tmp_path / "new.csv", "--text-column", "txt"),
            "did you mean 'text'?",
        ),
    ):
        failed = invoke(*arguments)
        assert failed.exit_code in (1, 2)
        assert message in failed.stderr
        assert failed.stderr.count("\n") == 1


def test_analyze_reads_the_texts_of_a_table_and_not_its_header_and_labels(made, tmp_path):
    folder, table, _ = made
    for model in ("hkt", "hsa"):
        out = tmp_path / model
        found = invoke("analyze", folder / model, "--data", table, "--output", out)
        assert found.exit_code == 0, found.output
    report = (tmp_path / "hkt" / "report.json").read_text()
    text = rows()[0][0]
    assert json.loads(report)["meta"]["notes"][0] == "Texts are in the column text of words.csv."
    assert json.dumps(text) in report
    assert "text,label" not in report
    # The run's own data are found without a name, too.
    assert invoke("analyze", folder / "hkt", "--output", tmp_path / "own").exit_code == 0


def test_data_that_changed_are_refused_by_every_command(made, tmp_path):
    folder, table, _ = made
    shutil.copytree(folder / "hkt", tmp_path / "run")
    shutil.copy(table, tmp_path / "words.csv")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(table), str(tmp_path / "words.csv")))
    sets = [f"--set={name}={value}" for name, value in TINY.items()]
    resume = (
        *("train", "--data", tmp_path / "words.csv", "--preset", "tiny", *sets),
        *("--output", tmp_path / "run", "--resume"),
    )
    assert invoke(*resume).exit_code == 0
    content = (tmp_path / "words.csv").read_text()
    (tmp_path / "words.csv").write_text(content.replace("fish", "frog"))
    for arguments, message in (
        (resume, "holds a run on other data (digest "),
        (("evaluate", tmp_path / "run"), "data must be as they were when the run began (digest "),
        (
            ("train", config, "--output", tmp_path / "new"),
            "data must be as they were when the run began (digest ",
        ),
    ):
        failed = invoke(*arguments)
        assert failed.exit_code in (1, 2)
        assert message in failed.stderr
    (tmp_path / "words.csv").unlink()
    assert "must be a file or folder that exists" in invoke("evaluate", tmp_path / "run").stderr


class StopError(Exception):
    pass


def test_an_interrupted_run_resumes_to_the_same_weights(made, tmp_path, monkeypatch):
    folder, table, _ = made
    planned = plan(table, model="hkt")
    step = loop._Run._step

    def stop(self, number):
        if number == 3:
            raise StopError
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_step", stop)
        with pytest.raises(StopError):
            run(planned.config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "result.json").exists()
    run(planned.config, tmp_path / "run", progress=False, resume=True)
    one, other = (
        HKTForSequenceClassification.from_pretrained(where).state_dict()
        for where in (tmp_path / "run", folder / "hkt")
    )
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("ending", ["md", "html"])
def test_a_folder_of_documents_trains_the_encoder_over_their_trees(ending, tmp_path):
    pages = write_pages(tmp_path / "pages", ending=ending)
    said = train_tiny(tmp_path / "run", "--data", pages)
    assert "the model is hsa, over the trees of the documents" in said
    config = read_config(tmp_path / "run")
    assert (config.task, config.model) == ("own-documents", "hsa")
    assert config.task_options["format"] == {"md": "markdown", "html": "html"}[ending]
    page = next((pages / "sea").iterdir())
    (answer,), _ = predict(tmp_path / "run", str(page))
    answers, _ = predict(tmp_path / "run", str(pages))
    same = next(one for one in answers if one.item.where == f"sea/{page.name}")
    assert answer.scores == pytest.approx(same.scores, abs=1e-4)
    kinds = load_task(config.task, **config.task_options).train[0]["tree"]
    assert int(kinds.depth.max()) > 3  # sections over paragraphs over sentences


def test_records_of_several_columns_train_as_trees_and_as_texts(tmp_path):
    table = [(f"title {n}", text, label) for n, (text, label) in enumerate(rows(30))]
    (tmp_path / "a.csv").write_text(as_csv(table, ("title", "body", "label")))
    options = ("--data", tmp_path / "a.csv", "--text-column", "title,body")
    train_tiny(tmp_path / "trees", *options, "--model", "hsa")
    train_tiny(tmp_path / "texts", *options, "--model", "standard")
    for name, task in (("trees", "own-documents"), ("texts", "own-texts")):
        assert read_config(tmp_path / name).task == task
        answers, _ = predict(tmp_path / name, str(tmp_path / "a.csv"))
        assert len(answers) == 30


@pytest.mark.parametrize(("model", "task"), [("hkt", "own-images"), ("hsa", "own-documents")])
def test_a_folder_of_images_trains_on_pixels_or_on_patches(model, task, tmp_path):
    images = write_images(tmp_path / "images")
    size = {"task.size": 6} if model == "hkt" else {}
    train_tiny(tmp_path / "run", "--data", images, "--model", model, **size)
    assert read_config(tmp_path / "run").task == task
    answers, _ = predict(tmp_path / "run", str(images))
    assert len(answers) == 24
    image = images / answers[5].item.where
    (single,), _ = predict(tmp_path / "run", str(image))
    assert single.scores == pytest.approx(answers[5].scores, abs=1e-4)
    measured = evaluate_data(tmp_path / "run", str(images))
    right = [answer.label == answer.item.where.split("/")[0] for answer in answers]
    assert measured["accuracy"] == pytest.approx(sum(right) / 24)
    if model == "hkt":
        (found, *_) = pipeline("image-classification", model=str(tmp_path / "run"))(str(image))
        assert (found["label"], found["score"]) == (
            single.label,
            pytest.approx(single.probability, abs=1e-4),
        )
    failed = invoke("predict", tmp_path / "run", "a text")
    assert failed.exit_code == 2
    assert failed.stderr.startswith("polyscale: text cannot be read by")


@pytest.mark.parametrize("model", ["hkt", "hsa"])
def test_a_text_trains_a_language_model_that_continues_a_prompt(model, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("The sea is wide. " * 200)
    options = ("--model", model, "--length", "16")
    said = train_tiny(tmp_path / "run", "--data", path, *options, **{"model.hidden_size": 24})
    assert "book.txt is one text: its language is modelled (--kind language)" in said
    written = invoke("generate", tmp_path / "run", "The sea", "--tokens", "12").stdout
    assert written.startswith("The sea")
    assert len(written.encode()) >= len("The sea") + 12
    hot = [generate(tmp_path / "run", "T", tokens=8, temperature=1.0, seed=n) for n in (0, 0, 1)]
    assert hot[0] == hot[1] != hot[2]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    # The last 5 % of the text are its test.
    (tmp_path / "test.txt").write_text(path.read_text()[-170:])
    measured = evaluate_data(tmp_path / "run", str(tmp_path / "test.txt"))
    assert measured["bits_per_token"] == pytest.approx(result["test"]["bits_per_token"])
    assert "must hold a classifier, got the language model" in (
        invoke("predict", tmp_path / "run", "a").stderr
    )


def test_the_pace_follows_from_the_steps_that_are_chosen(tmp_path):
    table = write_csv(tmp_path / "a.csv")
    for preset in ("tiny", "small"):
        planned = plan_own_run({"data": str(table)}, preset=preset, changes={"training.steps": 20})
        training = planned.config.training
        assert training.steps == 20
        assert training.evaluate_every == {"tiny": 10, "small": 1}[preset]
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        plan(table, changes={"training.steps": 0})
    with pytest.raises(ValueError, match=r"names of training must be one of .*got 'lr'"):
        plan(table, changes={"training.lr": 1})


def test_many_texts_without_labels_are_held_out_whole(tmp_path):
    planned = plan(write_csv(tmp_path / "a.csv"), kind="language", changes={})
    assert planned.config.task == "own-language"
    assert "held out 4 of 40 texts each for validation and test (seed 0)" in planned.said
    test = planned.data.test
    text = "".join(test.text(index) for index in range(len(test)))
    assert len(text.split("\n\n")) == 4
    assert set(text.split("\n\n")) <= {text for text, _ in rows()}


def test_a_tokenizer_of_hugging_face_replaces_bytes(tmp_path):
    from polyscale.models.hte.processing import _vocabulary

    words = sorted({word for text, _ in rows() for word in text.split()})
    _vocabulary(words).save_pretrained(tmp_path / "words")
    table = write_csv(tmp_path / "a.csv")
    options = ("--data", table, "--tokenizer", tmp_path / "words")
    train_tiny(tmp_path / "run", *options, "--model", "hkt")
    train_tiny(tmp_path / "language", *options, "--kind", "language", "--length", "8")
    data = load_task("own-texts", **read_config(tmp_path / "run").task_options)
    assert data.vocab_size == len(words) + 2
    assert data.train.text(0) in {text for text, _ in rows()}
    measured = evaluate_run(tmp_path / "run")
    test = [(data.test.text(n), data.label_names[y]) for n, y in enumerate(data.test.labels)]
    (tmp_path / "test.csv").write_text(as_csv(test))
    other = evaluate_data(tmp_path / "run", str(tmp_path / "test.csv"))
    assert other["loss"] == pytest.approx(measured["loss"])
    assert generate(tmp_path / "language", "No", tokens=3).startswith("No ")
    with pytest.raises(ValueError, match="tokenizer must be 'bytes', a folder or a name"):
        plan(table, tokenizer=str(tmp_path / "nothing"))


def test_a_folder_that_trainer_wrote_answers_too(tmp_path):
    tokenizer = byte_tokenizer(64)
    config = HKTConfig(
        vocab_size=257, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, levels=2,
        max_position_embeddings=64, eos_token_id=None, num_labels=2,
    )  # fmt: skip
    samples = [{**tokenizer(text), "labels": ("sea", "sky").index(label)} for text, label in rows()]
    arguments = TrainingArguments(
        str(tmp_path / "trainer"), max_steps=2, per_device_train_batch_size=8, report_to=[],
        save_steps=2, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        HKTForSequenceClassification(config), arguments, train_dataset=samples,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    numbered = [(text, ("sea", "sky").index(label)) for text, label in rows()]
    (tmp_path / "a.csv").write_text(as_csv(numbered))
    folder = tmp_path / "trainer" / "checkpoint-2"
    measured = evaluate_data(folder, str(tmp_path / "a.csv"))
    answers, _ = predict(folder, str(tmp_path / "a.csv"))
    right = [a.label == f"LABEL_{n}" for a, (_, n) in zip(answers, numbered, strict=True)]
    assert measured["accuracy"] == pytest.approx(sum(right) / 40)
    assert "--data must name data with labels, got none" in invoke("evaluate", folder).stderr

    language = HKTForCausalLM(HKTConfig(**{**config.to_diff_dict(), "positions": "rotary"}))
    language.save_pretrained(tmp_path / "language")
    failed = invoke("generate", tmp_path / "language", "a")
    assert "must have a tokenizer or a processor to read inputs, got none" in failed.stderr
    byte_tokenizer().save_pretrained(tmp_path / "language")
    assert generate(tmp_path / "language", "ab", tokens=4).startswith("ab")


def test_the_five_commands_of_the_page_lead_from_a_table_to_answers(tmp_path, monkeypatch):
    page = (Path(polyscale.__file__).parents[1] / "docs" / "own-data.md").read_text()
    monkeypatch.chdir(tmp_path)
    snippet = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(snippet[1], "own-data.md", "exec"), {})
    commands = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1].splitlines()
    assert len(commands) == 5
    said = []
    for command in commands:
        name, *arguments = shlex.split(command)
        found = invoke(*arguments)
        assert (name, found.exit_code) == ("polyscale", 0), found.output
        said.append(found.stdout)
    assert re.search(r"```text\n(.*?)```", page, re.DOTALL)[1] in said[0]
    assert json.loads(said[1])["accuracy"] == 1
    assert re.search(r"^text,good,0\.\d{4}$", said[2], re.MULTILINE)
    table = list(csv.DictReader((tmp_path / "answers.csv").open()))
    assert [row["label"] for row in table] == ["good", "bad"] * 30
    assert (tmp_path / "report.html").is_file()


def test_options_that_do_not_go_together_are_errors(tmp_path):
    table = write_csv(tmp_path / "a.csv")
    cases = {
        ("--data", table, "--task", "copy"): "--data must come without a YAML file and --task",
        ("--task", "copy", "--model", "hkt", "--text-column", "a"): "--text-column must come with",
        ("--data", table, "--trees", "windows"): "trees must be left out for classification",
        ("--data", table, "--kind", "other"): "kind must be one of 'classification', 'language'",
        ("--data", table, "--model", "lstm"): "model must be one of",
        ("--data", table, "--model", "hsa", "--length", "9"): "length does not go with",
        ("--data", table, "--model", "hsa", "--format", "record"): "format must be 'record' for",
        ("--model", "hkt"): "train takes --data, a YAML file, or --task and --model",
        ("--task", "copy", "--model", "hkt"): "--output must be a folder for the run, got none",
    }
    for arguments, message in cases.items():
        failed = invoke("train", "--preset", "tiny", *arguments)
        assert failed.exit_code == 2
        assert message in failed.stderr
