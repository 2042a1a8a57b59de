"""Tokenizers: ids by definition, saved and read by transformers alone."""

import pytest
import torch
from transformers import AutoTokenizer, pipeline

import polyscale as ps
from polyscale.data.listops import VOCABULARY, decode, encode
from polyscale.data.splits import decode_bytes
from polyscale.models.tokenizers import byte_tokenizer, codes_bytes, word_tokenizer

TEXTS = ["plain", "", " two  spaces ", "naïve €5 🙂\r\n\t\x00", "a<pad>b", "日本" * 50, "e\u0301"]


def reloaded(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("length", [None, 1, 7, 64, 100_000])
def test_ids_are_bytes_plus_one_before_and_after_saving(tmp_path, length):
    made = byte_tokenizer(length)
    for tokenizer in (made, reloaded(made, tmp_path)):
        assert len(tokenizer) == 257
        assert tokenizer.pad_token_id == 0
        for text in TEXTS:
            ids = [byte + 1 for byte in text.encode()][:length]
            assert tokenizer(text).input_ids == ids
            assert tokenizer.decode(ids) == decode_bytes(ids)


def test_nothing_but_json_is_saved(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert "auto_map" not in (tmp_path / "tokenizer_config.json").read_text()


def test_a_batch_is_padded_with_zeros_and_masked():
    batch = byte_tokenizer()(["a", "bcd"], padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch.input_ids.tolist() == [[98, 0, 0], [99, 100, 101]]
    assert batch.attention_mask.tolist() == [[1, 0, 0], [1, 1, 1]]


def test_every_byte_has_an_id_of_its_own():
    tokenizer = byte_tokenizer()
    letters = tokenizer.convert_ids_to_tokens(range(1, 257))
    assert len(set(letters)) == 256
    assert bytes(tokenizer.backend_tokenizer.decoder.decode(letters).encode()[:128]) == bytes(
        range(128)
    )


def test_trees_of_text_take_the_byte_tokenizer():
    text = "One café. Two.\n\nThree."
    tree = ps.SignalTree.from_text(text, byte_tokenizer())
    assert tree.num_leaves == len(text.encode())
    assert (tree.depth == 2).sum() == 3


def test_the_default_language_model_writes_bytes():
    torch.manual_seed(0)
    config = ps.HKTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    write = pipeline("text-generation", model=ps.HKTForCausalLM(config), tokenizer=byte_tokenizer())
    found = write("Once", max_new_tokens=3, do_sample=False, return_tensors=True)
    assert found[0]["generated_token_ids"][:4] == [byte + 1 for byte in b"Once"]


@pytest.mark.parametrize(
    ("length", "error", "words"),
    [
        (0, ValueError, "from 1 to 100,000, got 0"),
        (100_001, ValueError, "got 100001"),
        (True, TypeError, "an integer or None, got True"),
        (2.5, TypeError, "got 2.5"),
    ],
)
def test_a_bad_length_is_named(length, error, words):
    with pytest.raises(error, match=words):
        byte_tokenizer(length)


def test_words_have_the_ids_of_their_places_before_and_after_saving(tmp_path):
    made = word_tokenizer(VOCABULARY, 20)
    text = "[MAX 2 9 [MIN 4 7 ] 0 ]"
    for tokenizer in (made, reloaded(made, tmp_path)):
        assert len(tokenizer) == len(VOCABULARY)
        assert tokenizer.model_max_length == 20
        assert tokenizer(text).input_ids == encode(text)
        assert tokenizer.decode(encode(text)) == decode(encode(text)) == text
        # The files of the Long Range Arena have parentheses around everything.
        assert tokenizer("( ( ( [MAX 2 ) 9 ) ] )").input_ids == encode("[MAX 2 9 ]")
        with pytest.raises(Exception, match=r"(?i)unk"):
            tokenizer("[MAX two 9 ]")


@pytest.mark.parametrize("words", [[], ["1", "<pad>"], ["<pad>", "1", "1"]])
def test_a_bad_vocabulary_is_refused(words):
    with pytest.raises(ValueError, match="words must be different, the first one '<pad>'"):
        word_tokenizer(words)


def test_the_coding_of_a_tokenizer_can_be_told(tmp_path):
    assert codes_bytes(reloaded(byte_tokenizer(5), tmp_path))
    assert not codes_bytes(word_tokenizer(VOCABULARY))
