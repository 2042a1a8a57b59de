"""Trees from text: paragraphs, sentences and the tokens of a tokenizer."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyscale.trees.assembly import assemble
from polyscale.trees.checks import DOMAINS
from polyscale.trees.families import split_families
from polyscale.trees.sentences import split_paragraphs, split_sentences
from polyscale.trees.structure import index_in_family
from polyscale.trees.tree import SignalTree

SplitSentences = Callable[[str], Iterable[tuple[int, int]]]


def from_text(
    text: str,
    tokenizer: Any,
    encoding: Any,
    split: SplitSentences | None,
    max_family: int | None,
    modality: str,
) -> SignalTree:
    """See `SignalTree.from_text`."""
    if not isinstance(text, str):
        raise TypeError(f"text must be str, got {type(text).__name__}")
    if encoding is None:
        if tokenizer is None:
            raise TypeError("tokenizer must be given unless there is an encoding, got None")
        spans, special, live = _tokenize(text, tokenizer)
    else:
        spans, special, live = _read_encoding(encoding)
    wrong = ((spans < 0) | (spans > len(text))).any(1) | (spans[:, 0] > spans[:, 1])
    if wrong.any():
        token = int(wrong.nonzero()[0])
        raise ValueError(
            f"encoding: token {token} has offsets {spans[token].tolist()} in a text of "
            f"{len(text)} characters; does the encoding belong to another text?"
        )
    rows = live.nonzero().flatten()  # [tokens in the tree]
    if not rows.numel():
        raise ValueError("text must have at least one token, got none in its encoding")
    starts, paragraph_of_sentence = _sentences(text, split or split_sentences)
    first_character = _skip_space(text, spans[rows])
    sentence = (torch.searchsorted(starts, first_character, right=True) - 1).clamp(min=0)
    paragraph = paragraph_of_sentence[sentence]
    offsets = spans.masked_fill((special | ~live)[:, None], -1)  # [N, 2]
    tree = _build(rows, special[rows], sentence, paragraph, modality, offsets)
    return split_families(tree, max_family)[0]


def _build(
    rows: Tensor,
    special: Tensor,
    sentence: Tensor,
    paragraph: Tensor,
    modality: str,
    offsets: Tensor,
) -> SignalTree:
    """Group runs of tokens into sentences, and those into paragraphs, in the order of the rows."""

    def changes(values: Tensor) -> Tensor:
        return torch.cat([torch.tensor([True]), values[1:] != values[:-1]])

    after_special = torch.cat([torch.tensor([False]), special[:-1]])
    opens_top = special | after_special | changes(paragraph)  # [T]: a paragraph or a special token
    opens_sentence = ~special & (opens_top | changes(sentence))
    tops, sentences = int(opens_top.sum()), int(opens_sentence.sum())
    top_of_token = opens_top.long().cumsum(0)  # node numbers: the root is 0
    sentence_of_token = tops + opens_sentence.long().cumsum(0)
    parent = torch.cat(
        [
            torch.tensor([-1]),
            torch.zeros(tops, dtype=torch.int64),
            top_of_token[opens_sentence],
            sentence_of_token[~special],
        ]
    )
    leaf_row = torch.full_like(parent, -1)
    leaf_row[top_of_token[special]] = rows[special]
    leaf_row[1 + tops + sentences :] = rows[~special]
    # Already breadth-first, so from_parents is not needed.
    is_leaf = leaf_row >= 0
    position = parent.new_zeros(parent.numel(), 2)
    position[:, 0] = index_in_family(parent)
    return assemble(
        parent,
        leaf_row,
        domain=torch.where(is_leaf, -1, DOMAINS.index("sequence")),
        position=position,
        key=torch.full_like(parent, -1),
        modality=torch.where(is_leaf, 0, -1),
        modality_names=(modality,),
        tree_rows=(0, len(offsets)),
        source_offsets=offsets,
    )


def _sentences(text: str, split: SplitSentences) -> tuple[Tensor, Tensor]:
    """Return where each sentence begins in the text, and its paragraph's number."""
    starts, paragraphs = [], []
    for number, (begin, end) in enumerate(split_paragraphs(text)):
        previous = -1
        for span in split(text[begin:end]):
            start = span[0]
            if not previous < start <= end - begin:
                raise ValueError(
                    "split_sentences must return (start, end) spans in order, got a sentence at "
                    f"{start} after one at {previous} in a paragraph of {end - begin} characters"
                )
            # What precedes the first sentence, usually spaces, belongs to it.
            starts.append(begin + (start if previous >= 0 else 0))
            paragraphs.append(number)
            previous = start
        if previous < 0:
            starts.append(begin)
            paragraphs.append(number)
    return torch.tensor(starts), torch.tensor(paragraphs)


def _skip_space(text: str, spans: Tensor) -> Tensor:
    """Return the first non-space character of each token: byte-level BPE keeps spaces."""
    result = []
    for start, end in spans.tolist():
        token = text[start:end]
        stripped = token.lstrip()
        result.append(start + (len(token) - len(stripped) if stripped else 0))
    return torch.tensor(result)


def _tokenize(text: str, tokenizer: Any) -> tuple[Tensor, Tensor, Tensor]:
    if getattr(tokenizer, "is_fast", False):
        return _read_encoding(tokenizer(text, return_offsets_mapping=True))
    name = type(tokenizer).__name__
    data = text.encode("utf-8", errors="surrogatepass")
    tokens = tokenizer.tokenize(text) if hasattr(tokenizer, "tokenize") else None
    if tokens is None or [ord(token) if len(token) == 1 else -1 for token in tokens] != list(data):
        raise ValueError(
            f"tokenizer: {name} gives no offsets and its tokens are not the bytes of the text, so "
            "they cannot be aligned; pass a fast tokenizer, a bytewise one, or an encoding"
        )
    ids = tokenizer(text)["input_ids"]
    special = torch.tensor(
        tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True), dtype=torch.bool
    )
    width = [len(character.encode("utf-8", errors="surrogatepass")) for character in text]
    character = torch.arange(len(text)).repeat_interleave(torch.tensor(width, dtype=torch.int64))
    if int((~special).sum()) != len(data):
        raise ValueError(
            f"tokenizer: {name} gives {int((~special).sum())} tokens that are not special for "
            f"{len(data)} bytes of text, so they cannot be aligned"
        )
    spans = torch.zeros(len(ids), 2, dtype=torch.int64)
    spans[~special] = torch.stack([character, character + 1], dim=1)
    return spans, special, torch.ones_like(special)


def _read_encoding(encoding: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets [T, 2], which tokens are special, and which are not padding."""
    parts = getattr(encoding, "encodings", None)
    if parts and len(parts) != 1:
        raise ValueError(f"encoding must be of one text, got {len(parts)}; pass encoding[i]")
    source = parts[0] if parts else encoding
    if hasattr(source, "offsets"):
        offsets, sequences = source.offsets, source.sequence_ids
        mask, attention = source.special_tokens_mask, source.attention_mask
        if any(number not in (None, 0) for number in sequences):
            raise ValueError("encoding must be of one text, got a pair of texts")
    elif isinstance(source, Mapping) or hasattr(source, "keys"):
        if "offset_mapping" not in source:
            raise ValueError(
                "encoding must have offset_mapping, got "
                f"{', '.join(source.keys()) or 'nothing'}; call "
                "tokenizer(text, return_offsets_mapping=True)"
            )
        offsets, mask = source["offset_mapping"], source.get("special_tokens_mask")
        attention = source.get("attention_mask")
    else:
        raise TypeError(
            "encoding must be what a fast tokenizer returns, or a dict with offset_mapping, "
            f"got {type(encoding).__name__}"
        )
    spans = torch.as_tensor(offsets, dtype=torch.int64).reshape(-1, 2)
    empty = (spans == 0).all(1)
    live = _mask(attention, "attention_mask", torch.ones_like(empty))
    special = _mask(mask, "special_tokens_mask", empty) | empty
    if hasattr(encoding, "keys") and "input_ids" in encoding:
        ids = torch.as_tensor(encoding["input_ids"]).numel()
        if ids != len(spans):  # padded by hand, after the offsets were made
            raise ValueError(
                f"encoding must have an offset for each of {ids} input_ids, got {len(spans)}"
            )
    return spans, special, live


def _mask(values: Any, name: str, default: Tensor) -> Tensor:
    if values is None:
        return default
    mask = torch.as_tensor(values).flatten().bool()
    if mask.shape != default.shape:
        raise ValueError(
            f"{name} of encoding must have {len(default)} values, as its offsets, got {len(mask)}"
        )
    return mask
