from dataclasses import replace

import pytest

from polyscale.data.tasks import TASKS
from polyscale.training.builders import model_for_task
from polyscale.training.config import MODELS, RunConfig, models_of_task, read_assignment
from polyscale.training.presets import PRESETS, preset_config
from polyscale.training.settings import TrainingSettings

CONFIG = RunConfig(
    task="copy", model="hkt", task_options={"length": 16}, model_options={"levels": 2}, seed=3
)

_COMPILED = TrainingSettings(compile=True)


def test_yaml_and_back_is_the_same_run(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG.to_yaml(), encoding="utf-8")
    read = RunConfig.from_yaml(tmp_path / "run.yaml")
    assert read == CONFIG
    assert read.first_difference(CONFIG) is None


def test_numbers_may_be_written_with_an_exponent(tmp_path):
    text = "task: copy\nmodel: hkt\ntraining: {learning_rate: 3e-4}\n"
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    assert RunConfig.from_yaml(tmp_path / "run.yaml").training.learning_rate == 3e-4


def test_texts_that_begin_or_look_like_numbers_stay_texts(tmp_path):
    options = {"data": "2e5cc2.csv", "label": "1e5", "text": ["1e-3", "0x1f"], "digest": "9e1x"}
    config = RunConfig(task="own-texts", model="hkt", task_options=options)
    (tmp_path / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert RunConfig.from_yaml(tmp_path / "run.yaml") == config


def test_a_small_file_is_enough_and_defaults_fill_the_rest(tmp_path):
    (tmp_path / "run.yaml").write_text("task: copy\nmodel: standard\n", encoding="utf-8")
    assert RunConfig.from_yaml(tmp_path / "run.yaml") == RunConfig(task="copy", model="standard")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: copy\nmodel: [", "must be YAML"),
        ("- 1\n", "must be a mapping"),
        ("task: copy\n", "must have 'model'"),
        ("task: sudoku\nmodel: hkt\n", "task must be one of 'listops', .*got 'sudoku'"),
        ("task: copy\nmodel: mamba\n", "model must be one of 'standard', 'hkt', .* got 'mamba'"),
        ("task: coco18\nmodel: hkt\n", "one of 'hsa', 'fsa', 'deepset', got 'hkt'; .* task coco18"),
        ("task: copy\nmodel: fsa\n", "one of 'standard', 'hkt', 'hsa', got 'fsa'; .* task copy"),
        ("task: copy\nmodel: hkt\nlevels: 3\n", "must be one of task, model.*got 'levels'"),
        (
            "task: copy\nmodel: hkt\ntraining: {lr: 1}\n",
            "names of training must be one of steps.*got 'lr'",
        ),
        ("task: copy\nmodel: hkt\ntraining: {steps: 0}\n", "steps must be at least 1"),
        ("task: copy\nmodel: hkt\ntraining: 7\n", "training must be a mapping"),
        (
            "task: copy\nmodel: hkt\ntask_options: {depth: 1}\n",
            "names of task_options must be .*got 'depth'",
        ),
        ("task: copy\nmodel: hkt\nseed: -1\n", "seed must be an integer of at least 0"),
        ("task: copy\nmodel: hkt\nname: a/b\n", "name must be letters"),
        ("!!python/object/apply:os.system ['true']\n", "must be YAML"),
    ],
)
def test_a_bad_file_is_named_together_with_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        RunConfig.from_yaml(path)
    assert "run.yaml" in str(error.value)


def test_values_are_set_by_dotted_names():
    changed = CONFIG.with_values({"training.steps": 200, "model.levels": 4, "task.length": 8})
    assert changed.training.steps == 200
    assert changed.model_options == {"levels": 4}
    assert changed.task_options == {"length": 8}
    assert CONFIG.with_values({"seed": 9}).seed == 9
    assert CONFIG.first_difference(changed) == "model_options.levels is 2 and 4"


def test_an_unknown_dotted_name_is_refused():
    for name in ("trainer.steps", "training.step", "speed"):
        with pytest.raises(ValueError, match=f"must be .*got .*{name.split('.')[-1]}"):
            CONFIG.with_values({name: 1})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1e-3", 1e-3),
        ("a=0.5", 0.5),
        ("a=true", True),
        ("a=mean", "mean"),
        ("a=[0.5, 0.5]", [0.5, 0.5]),
        ("a=b=c", "b=c"),
    ],
)
def test_assignments_read_values_as_yaml_does(text, value):
    assert read_assignment(text) == ("a", value)


def test_an_assignment_without_a_value_is_refused():
    for text in ("steps", "=3", "a=[1"):
        with pytest.raises(ValueError, match="--set"):
            read_assignment(text)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("task", TASKS)
def test_every_preset_is_a_valid_run_for_every_model(task, preset):
    models = models_of_task(task)
    for model in models:
        config = preset_config(task, model, preset)
        assert RunConfig.from_dict(config.as_dict()) == config
        budget = replace(config.training, filter_rate=1.0)  # standard attention has no filters
        assert budget == preset_config(task, models[0], preset).training, "one budget for all"
    for model in set(MODELS) - set(models):
        with pytest.raises(ValueError, match=f"got '{model}'; .* for the task {task}"):
            preset_config(task, model, preset)
    if "hkt" not in models:
        return
    standard, hkt = (preset_config(task, model, preset) for model in ("standard", "hkt"))
    shared = {name: hkt.model_options[name] for name in standard.model_options}
    assert shared == standard.model_options, "one size for all"
    own = {"levels", "values", "downsampling", "downsampling_width", "filter_width"}
    assert hkt.model_options.keys() - standard.model_options.keys() <= own


def test_unknown_names_of_presets_are_refused():
    for arguments in (("sudoku", "hkt", "small"), ("copy", "gpt", "small"), ("copy", "hkt", "xl")):
        with pytest.raises(ValueError, match="must be one of"):
            preset_config(*arguments)
    with pytest.raises(ValueError, match="levels must be given with the model 'hkt' only"):
        preset_config("copy", "standard", levels=2)


def test_bad_model_options_are_named(copy_task):
    for options, message in (
        ({"depth": 3}, "model_options of HKTConfig must be one of .*got 'depth'"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "multiple of num_attention_heads"),
        ({"levels": "three"}, "model_options: "),
        ({"values": "coarse"}, "values"),
    ):
        with pytest.raises(ValueError, match=message):
            model_for_task("hkt", options, copy_task)
    with pytest.raises(ValueError, match="levels must be 1 for the model 'standard'"):
        model_for_task("standard", {"levels": 3}, copy_task)


@pytest.fixture(scope="module")
def copy_task():
    from polyscale.data.tasks import load_task

    return load_task("copy", train=20, validation=5, test=5)


def doubling(lines):
    """YAML in which every line holds the one before it nine times."""
    text = "a0: &a0 [1, 1]\n"
    for number in range(1, lines):
        inner = ", ".join([f"*a{number - 1}"] * 9)
        text += f"a{number}: &a{number} [{inner}]\n"
    return text


def test_aliases_that_multiply_are_refused_before_they_are_written_out(tmp_path):
    path = tmp_path / "run.yaml"
    aliases = doubling(9).replace("\n", "\n  ")
    path.write_text(f"task: copy\nmodel: standard\ntask_options:\n  {aliases}\n")
    assert path.stat().st_size < 600
    with pytest.raises(
        ValueError, match=r"run\.yaml.*aliases must expand to at most 1,\d+ characters"
    ):
        RunConfig.from_yaml(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "b: &b {k: 1}\nm: &m {<<: ["
            + "*b, " * 200
            + "*b]}\n"
            + "n: {<<: ["
            + "*m, " * 200
            + "*m]}",
            "aliases must expand to at most",
        ),
        ("s: &s " + 800 * "x" + "\nt: [" + "*s, " * 30 + "]", "aliases must expand to at most"),
        ("&a [1, *a]", "an alias must not contain itself"),
        ("[" * 700, "nested too deeply"),
        ("9" * 5_000, "digits"),
        ("2024-99-99", "month"),
        ("!!bool perhaps", "a value does not have the type of its tag"),
        ("!!timestamp soon", "a value does not have the type of its tag"),
        ("a: *unknown", "undefined alias"),
    ],
)
def test_yaml_that_cannot_be_read_in_its_own_length_is_refused_by_file(tmp_path, text, reason):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"(?s)run\.yaml must be YAML: .*{reason}"):
        RunConfig.from_yaml(path)
    with pytest.raises(ValueError, match=rf"(?s)--set training\.steps must be .*{reason}"):
        read_assignment(f"training.steps={text}")


def test_an_alias_that_saves_a_line_is_read(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "task: copy\nmodel: hkt\ntask_options: {train: &n 20, test: *n}\n"
        "model_options: {levels: 2}\n"
    )
    assert RunConfig.from_yaml(path).task_options == {"train": 20, "test": 20}


def test_compiling_the_tree_encoder_is_refused_with_the_reason(tmp_path):
    text = "task: listops\nmodel: hsa\ntraining: {compile: true}\n"
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"run\.yaml: training\.compile must be false .* not faster .* set it to"
    ):
        RunConfig.from_yaml(tmp_path / "run.yaml")
    for model in ("hkt", "standard", "fsa"):
        assert replace(RunConfig("listops", model), training=_COMPILED).training.compile
    # The language model has windows of equal size and does get faster.
    assert replace(RunConfig("copy", "hsa"), training=_COMPILED).training.compile
