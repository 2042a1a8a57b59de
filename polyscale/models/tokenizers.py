"""Tokenizers of the tasks: for bytes, and for vocabularies of words.

They are fast tokenizers of transformers without classes of their own, so `AutoTokenizer` and
`pipeline` read them without polyscale.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from polyscale._extras import require

PADDING = "<pad>"


def byte_tokenizer(length: int | None = None) -> PreTrainedTokenizerFast:
    """The byte tokenizer of polyscale: id = byte + 1 in UTF-8, 0 is padding, 257 ids.

    The ids of `ByT5Tokenizer` of transformers differ: they are byte + 3.

    Args:
        length: keep the first `length` bytes of a text, as the byte tasks do; None keeps all.

    Example:
        >>> byte_tokenizer()("aé").input_ids, byte_tokenizer(2)("aé").input_ids
        ([98, 196, 170], [98, 196])
    """
    tokenizers: Any = require("tokenizers", "hf", "byte_tokenizer")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
        raise TypeError(f"length must be an integer or None, got {length!r}")
    # The regular expression that truncates does not support longer repeats.
    if length is not None and not 1 <= length <= 100_000:
        raise ValueError(
            f"length must be from 1 to 100,000, got {length}; use None to keep whole texts"
        )
    letters = _letters()
    vocabulary = {PADDING: 0, **{letter: byte + 1 for byte, letter in enumerate(letters)}}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    steps = [tokenizers.normalizers.ByteLevel()]
    if length is not None:
        rest = tokenizers.Regex(rf"\A.{{{length}}}\K.+")
        steps.append(tokenizers.normalizers.Replace(rest, ""))
    made.normalizer = tokenizers.normalizers.Sequence(steps)
    made.decoder = tokenizers.decoders.ByteLevel()
    return _wrapped(made, length)


def word_tokenizer(words: Sequence[str], length: int | None = None) -> PreTrainedTokenizerFast:
    """Words between spaces; the id of a word is its place, and the first word is padding.

    Parentheses are left out, as the files of ListOps and the examples of the language tasks have
    some. A word that is not in the vocabulary is an error.

    Args:
        words: the vocabulary.
        length: the longest sequence of the model, of which transformers warns.

    Example:
        >>> word_tokenizer(["<pad>", "1", "2"])("2 (1) 2").input_ids
        [2, 1, 2]
    """
    tokenizers: Any = require("tokenizers", "hf", "word_tokenizer")
    if len(set(words)) != len(words) or list(words[:1]) != [PADDING]:
        raise ValueError(f"words must be different, the first one {PADDING!r}; got {words!r}")
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    replace = tokenizers.normalizers.Replace
    made.normalizer = tokenizers.normalizers.Sequence([replace("(", " "), replace(")", " ")])
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return _wrapped(made, length)


def codes_bytes(tokenizer: Any) -> bool:
    """Whether a tokenizer has the vocabulary of `byte_tokenizer`."""
    return bool(tokenizer.get_vocab() == byte_tokenizer().get_vocab())


def _wrapped(made: Any, length: int | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=PADDING,
        model_max_length=length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        # A text may hold the letters of "<pad>": they are no padding.
        split_special_tokens=True,
    )


def _letters() -> list[str]:
    """The characters of byte-level tokenizers: the byte if it is printable, otherwise a letter."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + others.index(byte)) for byte in range(256)]
