"""Options of configurations: names that nobody knows are refused, what was saved is read."""

import json
import warnings
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig

import polyscale as ps

ROOT = Path(__file__).parents[2]
CONFIGS = [ps.HKTConfig, ps.HSAConfig, ps.HTEConfig]


@pytest.mark.parametrize(
    ("make", "name", "advice"),
    [
        (ps.HKTConfig, "level", "did you mean levels?"),
        (ps.HKTConfig, "n_levels", "did you mean levels?"),
        (ps.HKTConfig, "Levels", "did you mean levels?"),
        (ps.HKTConfig, "num_label", "did you mean num_labels?"),
        (ps.HKTConfig, "num_heads", "did you mean num_attention_heads?"),
        (ps.HKTConfig, "num_layers", "use num_hidden_layers"),
        (ps.HKTConfig, "n_layers", "use num_hidden_layers"),
        (ps.HKTConfig, "d_model", "use hidden_size"),
        (ps.HKTConfig, "max_length", "pass it to generate(), or set it in generation_config"),
        (ps.HKTConfig, "windows", "its options are attention_impl, bos_token_id, causal, "),
        (ps.HKTConfig, "save_pretrained", "did you mean"),
        (ps.HSAConfig, "window", "did you mean windows?"),
        (ps.HSAConfig, "levels", "its options are attention_impl"),
        (ps.HTEConfig, "vocab_size", 'use modalities={"default": {"vocab_size": ...}}'),
        (ps.HTEConfig, "input_channels", 'use modalities={"default": {"width": ...}}'),
        (ps.HTEConfig, "modality", "did you mean modalities?"),
    ],
)
def test_an_option_that_nobody_knows_is_refused_with_the_nearest_one(make, name, advice):
    with pytest.raises(ValueError, match=f"{make.__name__} has no option '{name}'; ") as found:
        make(**{name: 3})
    assert advice in str(found.value)


def test_auto_config_refuses_it_too():
    with pytest.raises(ValueError, match="did you mean levels"):
        AutoConfig.for_model("hkt", level=1)


@pytest.mark.parametrize("make", CONFIGS)
def test_what_transformers_knows_is_taken(make):
    names = {0: "no", 1: "yes", 2: "perhaps"}
    config = make(
        id2label=names,
        label2id={name: number for number, name in names.items()},
        architectures=["X"],
        dtype="bfloat16",
        torch_dtype="bfloat16",
        transformers_version="5.0.0",
        problem_type="single_label_classification",
        name_or_path="somewhere",
        output_attentions=False,
        output_hidden_states=True,
        return_dict=True,
        attn_implementation="eager",
        pad_token_id=0,
        eos_token_id=1,
        task_specific_params={},
    )
    assert config.num_labels == 3
    assert make(num_labels=5).num_labels == 5


@pytest.mark.parametrize("make", CONFIGS)
def test_what_a_configuration_tells_of_itself_makes_it_again(make, tmp_path):
    config = make(num_labels=3, dropout=0.25)
    config.architectures = ["Anything"]
    config.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = [
            make(**config.to_dict()),
            make(**config.to_diff_dict()),
            make.from_pretrained(tmp_path),
            make.from_json_file(tmp_path / "config.json"),
            AutoConfig.from_pretrained(tmp_path),
        ]
    for each in again:
        assert each.to_diff_dict() == config.to_diff_dict()


def test_every_committed_configuration_is_read_without_a_warning():
    folders = sorted((ROOT / "experiments").glob("**/result.json"))
    contents = [json.loads(path.read_text())["model_config"] for path in folders]
    contents += [json.loads(path.read_text()) for path in ROOT.glob("experiments/*/*/config.json")]
    ours = {"hkt": ps.HKTConfig, "hsa": ps.HSAConfig, "hte": ps.HTEConfig}
    assert len(contents) > 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for content in contents:
            config = ours[content["model_type"]].from_dict(content)
            told = {**config.to_dict(), "transformers_version": content["transformers_version"]}
            assert {name: told[name] for name in content} == json_like(content)


def json_like(content):
    """JSON has no whole numbers as keys."""
    labels = content.get("id2label")
    if labels is None:
        return content
    return {**content, "id2label": {int(number): name for number, name in labels.items()}}


def saved(folder, **additions):
    ps.HKTConfig(levels=2).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **additions}))
    return folder


def test_a_misspelt_option_in_a_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no option 'n_levels'; did you mean levels"):
        ps.HKTConfig.from_pretrained(saved(tmp_path, n_levels=1))


def test_what_another_library_added_to_a_file_is_kept_with_a_warning(tmp_path):
    folder = saved(tmp_path, quantisation_notes={"bits": 4}, max_new_tokens=7)
    with pytest.warns(UserWarning, match="have no effect: quantisation_notes"):
        config = ps.HKTConfig.from_pretrained(folder)
    assert config.levels == 2
    assert config.quantisation_notes == {"bits": 4}
    config.save_pretrained(tmp_path / "again")
    assert "quantisation_notes" in (tmp_path / "again" / "config.json").read_text()


def test_a_newer_transformers_may_have_options_of_any_name(tmp_path):
    folder = saved(tmp_path, kernels="any", transformers_version="99.1.0.dev0")
    with pytest.warns(
        UserWarning, match=rf"to transformers {transformers.__version__} and have no effect"
    ):
        assert ps.HKTConfig.from_pretrained(folder).levels == 2


def test_a_misspelt_replacement_is_refused_when_a_file_is_read(tmp_path):
    folder = saved(tmp_path)
    assert ps.HKTConfig.from_pretrained(folder, levels=1).levels == 1
    for read in (ps.HKTConfig.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match="no option 'level'; did you mean levels"):
            read(folder, level=1)
    config, unused = ps.HKTConfig.from_pretrained(folder, level=1, return_unused_kwargs=True)
    assert (config.levels, unused) == (2, {"level": 1})


def test_a_misspelt_replacement_is_refused_when_a_model_is_loaded(tmp_path):
    config = ps.HKTConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, levels=2)
    ps.HKTModel(config).save_pretrained(tmp_path)
    with pytest.raises((TypeError, ValueError), match="level"):
        ps.HKTModel.from_pretrained(tmp_path, level=1)
