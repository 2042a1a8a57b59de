import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertTokenizer,
    ByT5Tokenizer,
    T5Config,
)

from polyscale.analysis.models import find_snapshots, load_model
from polyscale.analysis.recording import attention_calls
from polyscale.analysis.transformer import analyze_attention
from polyscale.data.tasks import load_task
from polyscale.inject import inject_hsa, injected_layers, save_injected
from polyscale.models import (
    HKTConfig,
    HKTForCausalLM,
    HKTForSequenceClassification,
    HSAConfig,
    HSAForCausalLM,
    byte_tokenizer,
    word_tokenizer,
)
from polyscale.report.analysis.command import run_analyze
from polyscale.training.builders import model_for_task
from polyscale.training.config import RunConfig

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = "The old clock stopped at noon. Nobody <b>in</b> the house “noticed” for a week."


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def hkt(folder, tokenizer=True, **options):
    torch.manual_seed(0)
    HKTForCausalLM(HKTConfig(**SIZES, levels=2, **options)).save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def bert(folder, model_class=BertModel):
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.<>/“”"]
    words += [f"##{word}" for word in words[5:31]] + ["the", "clock"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        **SIZES, vocab_size=len(words), intermediate_size=32, max_position_embeddings=40
    )
    model_class(config).save_pretrained(folder)
    return folder


def test_an_hkt_model_on_a_text_file_becomes_a_report(tmp_path, text):
    told = []
    analysis, written = run_analyze(
        str(hkt(tmp_path / "model")), str(text), tmp_path / "out", progress=told.append
    )
    assert written == [tmp_path / "out" / "report.html", tmp_path / "out" / "report.json"]
    assert json.loads(written[1].read_text()) == analysis
    assert analysis["meta"]["kind"] == "hkt"
    assert analysis["meta"]["title"] == "model on text.txt"
    assert analysis["meta"]["text"] == TEXT
    assert "".join(analysis["meta"]["tokens"][:8]) == "The old "
    assert "<e2>" in analysis["meta"]["tokens"]  # a byte of a quotation mark
    assert {"levels", "kernel", "symmetry", "error", "normality", "cost"} <= set(analysis)
    page = written[0].read_text(encoding="utf-8")
    assert [name for name in ("attention", "error", "hsa") if f'<section id="{name}"' in page] == [
        "attention",
        "error",
    ]
    assert told == ["loading the model", "reading the data", "analysing"]


def test_an_hsa_model_on_a_text_file_shows_its_tree(tmp_path, text):
    torch.manual_seed(0)
    HSAForCausalLM(HSAConfig(**SIZES, windows=[4])).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    analysis, _ = run_analyze(str(tmp_path / "model"), str(text), tmp_path / "out")
    assert analysis["meta"]["kind"] == "hsa"
    assert len(analysis["hsa"]["layers"]) == 4


@pytest.mark.parametrize("model_class", [BertModel, BertForMaskedLM])  # the second has no pooler
def test_a_hugging_face_encoder_is_read_with_its_own_tokenizer(tmp_path, text, model_class):
    folder = bert(tmp_path / "bert", model_class)
    analysis, _ = run_analyze(str(folder), str(text), tmp_path / "out.html", title="Mine")
    assert analysis["meta"]["kind"] == "transformer"
    assert analysis["meta"]["title"] == "Mine"
    assert analysis["meta"]["tokens"][:3] == ["[CLS]", "the", "o"]
    assert analysis["meta"]["length"] == 40  # as many as the model has positions
    assert re.search(r"first 40 of \d+ tokens", analysis["meta"]["notes"][0])


def test_a_long_text_is_cut_and_the_report_says_so(tmp_path, text):
    analysis, _ = run_analyze(
        str(hkt(tmp_path / "model")), str(text), tmp_path / "out", max_length=30
    )
    assert analysis["meta"]["length"] == 30
    assert analysis["meta"]["text"] == TEXT[:30]
    total = len(TEXT.encode())
    assert f"The text is cut to its first 30 of {total} tokens." in analysis["meta"]["notes"]


def test_a_task_is_read_by_its_name(tmp_path):
    folder = hkt(tmp_path / "model", vocab_size=300)
    analysis, _ = run_analyze(str(folder), "copy", tmp_path / "out", examples=3)
    assert analysis["meta"]["title"] == "model on copy (test)"
    sample = load_task("copy").test[0]["input_ids"]
    assert analysis["meta"]["length"] == len(sample)
    assert analysis["meta"]["tokens"] in (None, [str(number) for number in sample.tolist()])


def test_options_of_a_task_are_passed_on(tmp_path, text):
    folder = hkt(tmp_path / "model", vocab_size=300)
    options = {"length": 5, "train": 10, "validation": 4, "test": 4}
    analysis, _ = run_analyze(str(folder), "copy", tmp_path / "out", task_options=options)
    assert analysis["meta"]["length"] == 11
    words = "task_options go with a task"
    assert_refused(ValueError, words, str(folder), str(text), tmp_path, task_options=options)


def small_run(folder, model):
    config = RunConfig.from_dict(
        {
            "task": "listops",
            "model": model,
            "task_options": {
                "preset": "demo", "min_length": 5, "max_length": 30,
                "train": 60, "validation": 20, "test": 20,
            },
            "model_options": {"num_hidden_layers": 1} if model == "hkt" else {},
        }
    )  # fmt: skip
    folder.mkdir()
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    data = load_task(config.task, **config.task_options)
    build = model_for_task(config.model, config.model_options, data).build
    for place in ("snapshots/step-000000", "snapshots/step-000002", "snapshots/step-000004", "."):
        build().save_pretrained(folder / place)
    return folder


def test_a_training_run_needs_no_data_and_shows_normality_over_its_snapshots(tmp_path):
    folder = small_run(tmp_path / "run", "hkt")
    analysis, _ = run_analyze(str(folder), None, tmp_path / "out", examples=4)
    steps = {entry["step"] for entry in analysis["normality"]["over_training"]}
    assert steps == {0, 2, 4}
    assert analysis["meta"]["title"] == "run on listops (test)"
    assert analysis["meta"]["length"] <= 30  # the options of the run


def test_a_run_over_trees_is_read_with_its_trees(tmp_path):
    folder = small_run(tmp_path / "run", "hsa")
    analysis, _ = run_analyze(str(folder), None, tmp_path / "out", examples=2)
    assert analysis["meta"]["kind"] == "hsa"
    assert analysis["hsa"]["layers"]


def test_at_most_twelve_snapshots_are_taken_with_the_first_and_the_last(tmp_path):
    for step in range(0, 4000, 100):
        folder = tmp_path / "snapshots" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    (tmp_path / "snapshots" / "step-000050").mkdir()  # without weights
    chosen, total = find_snapshots(tmp_path)
    assert total == 40
    assert len(chosen) == 12
    assert (chosen[0][0], chosen[-1][0]) == (0, 3900)
    assert find_snapshots(tmp_path / "nothing") == ([], 0)


def assert_refused(error, words, *arguments, **options):
    with pytest.raises(error, match=words) as caught:
        run_analyze(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_a_target_that_is_no_folder_is_named(tmp_path, text):
    missing, words = str(tmp_path / "missing"), "target must be a folder.*missing"
    assert_refused(FileNotFoundError, words, missing, str(text), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, text, name):
    folder = hkt(tmp_path / "model")
    (folder / name).unlink()
    assert_refused(FileNotFoundError, f"{name} is missing", str(folder), str(text), tmp_path)


def test_pickled_weights_are_not_read(tmp_path, text):
    folder = hkt(tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    words = "model.safetensors is missing"
    assert_refused(FileNotFoundError, words, str(folder), str(text), tmp_path)


def test_damaged_weights_are_refused(tmp_path, text):
    folder = hkt(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not weights")
    assert_refused(ValueError, "model cannot be loaded", str(folder), str(text), tmp_path)


def test_weights_that_are_not_there_are_not_made_up(tmp_path, text):
    folder = hkt(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    dropped = next(name for name in weights if "attention" in name)
    del weights[dropped]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    words = f"lacks 1 weights of its model, first {re.escape(dropped)}"
    assert_refused(ValueError, words, str(folder), str(text), tmp_path)


def test_code_from_a_model_folder_is_not_run(tmp_path, text):
    folder = bert(tmp_path / "bert")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModel": "code.Mine", "AutoConfig": "code.C"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert_refused(ValueError, "bert cannot be loaded", str(folder), str(text), tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_an_encoder_decoder_is_refused_in_words(tmp_path, text):
    T5Config().save_pretrained(tmp_path / "t5")
    words = "encoder-decoder model .t5.: not supported"
    assert_refused(ValueError, words, str(tmp_path / "t5"), str(text), tmp_path / "out")


@pytest.mark.parametrize("config", ["[]", "{", "{}"])
def test_a_broken_configuration_is_named(tmp_path, text, config):
    folder = hkt(tmp_path / "model")
    (folder / "config.json").write_text(config)
    assert_refused(ValueError, "config.json", str(folder), str(text), tmp_path / "out")


def test_without_data_only_a_run_will_do(tmp_path):
    folder = hkt(tmp_path / "model")
    words = "data must be a text file or a task .*listops.*has no config.yaml"
    assert_refused(ValueError, words, str(folder), None, tmp_path / "out")


def test_data_that_are_neither_a_file_nor_a_task_are_named(tmp_path):
    folder = hkt(tmp_path / "model")
    words = "data must be a text file or a task .*'nowhere.txt', which is neither"
    assert_refused(FileNotFoundError, words, str(folder), "nowhere.txt", tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe\x00", "UTF-8")]
)
def test_a_file_without_text_is_refused(tmp_path, content, words):
    (tmp_path / "bad.txt").write_bytes(content)
    folder = hkt(tmp_path / "model")
    assert_refused(ValueError, words, str(folder), str(tmp_path / "bad.txt"), tmp_path / "out")


@pytest.mark.parametrize("size", [17, 259])
def test_without_a_tokenizer_the_coding_is_not_guessed(tmp_path, text, size):
    folder = hkt(tmp_path / "model", tokenizer=False, vocab_size=size)
    assert_refused(ValueError, "has no tokenizer", str(folder), str(text), tmp_path / "out")


def test_a_run_of_before_tokenizers_were_saved_reads_the_bytes_of_the_tasks(tmp_path, text):
    pages = [
        run_analyze(
            str(hkt(tmp_path / name, tokenizer, vocab_size=257)), str(text), tmp_path / name
        )
        for name, tokenizer in (("old", False), ("new", True))
    ]
    old, new = (analysis["meta"] for analysis, _ in pages)
    assert old["tokens"] == new["tokens"]
    assert old["text"] == new["text"] == TEXT
    assert pages[0][0]["levels"] == pages[1][0]["levels"]


def test_a_text_of_words_that_the_model_does_not_know_is_refused(tmp_path, text):
    folder = hkt(tmp_path / "model", tokenizer=False, vocab_size=3)
    word_tokenizer(["<pad>", "old", "clock"]).save_pretrained(folder)
    assert_refused(ValueError, "in the words of the model", str(folder), str(text), tmp_path)


def test_a_model_with_a_tokenizer_of_another_coding_is_read_with_it(tmp_path, text):
    folder = hkt(tmp_path / "model", tokenizer=False)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    analysis, _ = run_analyze(str(folder), str(text), tmp_path / "out")
    assert analysis["meta"]["tokens"][-1] == "</s>"


def test_a_text_beyond_what_a_classifier_was_trained_on_is_cut_and_the_report_says_so(
    tmp_path, text
):
    torch.manual_seed(0)
    folder = tmp_path / "model"
    config = HKTConfig(**SIZES, vocab_size=257, positions="rotary", causal=False, num_labels=2)
    HKTForSequenceClassification(config).save_pretrained(folder)
    byte_tokenizer(20).save_pretrained(folder)
    analysis, _ = run_analyze(str(folder), str(text), tmp_path / "out")
    assert analysis["meta"]["text"] == TEXT[:20]
    notes = analysis["meta"]["notes"]
    assert f"The text is cut to its first 20 of {len(TEXT.encode())} tokens." in notes


def test_a_task_with_other_tokens_than_the_model_is_refused(tmp_path):
    folder = hkt(tmp_path / "model", vocab_size=3)
    assert_refused(ValueError, "the model takes 0 to 2", str(folder), "copy", tmp_path / "out")


def test_a_model_of_numbers_is_refused_text_and_tokens(tmp_path, text):
    config = HKTConfig(**SIZES, input_channels=1, num_labels=2)
    HKTForSequenceClassification(config).save_pretrained(tmp_path / "model")
    for data in (str(text), "copy"):
        words = "the model takes numbers"
        assert_refused(ValueError, words, str(tmp_path / "model"), data, tmp_path / "out")


@pytest.mark.parametrize("option", ["examples", "max_length"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (True, TypeError), (2.5, TypeError)])
def test_counts_are_checked(tmp_path, text, option, value, error):
    words = f"{option} must be an integer of at least 1, got {value}"
    assert_refused(error, words, str(tmp_path), str(text), tmp_path, **{option: value})


def test_the_model_is_loaded_for_evaluation(tmp_path):
    assert not load_model(hkt(tmp_path / "model", dropout=0.5)).training


def test_a_target_with_a_slash_at_the_end_has_its_name_in_the_title(tmp_path, text):
    folder = hkt(tmp_path / "model")
    analysis, _ = run_analyze(f"{folder}/", str(text), tmp_path / "out")
    assert analysis["meta"]["title"] == "model on text.txt"


def test_an_injected_model_is_analysed_as_it_attends(tmp_path, text):
    folder = bert(tmp_path / "bert")
    model = inject_hsa(BertModel.from_pretrained(folder).eval(), layers=[1], hierarchy=(2, 2))
    save_injected(model, folder)
    loaded = load_model(folder)
    assert injected_layers(loaded) == [1]
    ids = torch.randint(5, 30, (1, 13))
    found = analyze_attention(loaded, ids)
    assert any("HSA is injected in layers 1:" in note for note in found["meta"]["notes"])
    call_plain, call_injected = attention_calls(loaded, {"input_ids": ids})[0]
    loaded.set_attn_implementation("eager")
    with torch.no_grad():
        applied = loaded(ids, output_attentions=True).attentions
    for call, weights in ((call_plain, applied[0]), (call_injected, applied[1])):
        torch.testing.assert_close(call.attention().float(), weights[0], atol=1e-6, rtol=1e-6)
    softmax = call_injected.scores().softmax(-1).float()
    assert (softmax - applied[1][0]).abs().max() > 1e-4
    output = tmp_path / "page.html"
    run_analyze(str(folder), str(text), output)
    assert "HSA is injected in layers 1" in output.read_text()
