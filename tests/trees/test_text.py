# ruff: noqa: RUF001 - the marks of other scripts are meant
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from polyscale.trees import SignalTree
from polyscale.trees.sentences import split_paragraphs, split_sentences

TEXT = 'Héllo there. It is fine. "Why?" he asked.\n\nA new one! Done.'
SENTENCES = [["Héllo there.", "It is fine.", '"Why?" he asked.'], ["A new one!", "Done."]]


def byte_level(trim: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 1), ("<s>", 0), trim_offsets=trim, add_prefix_space=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture(scope="module", params=[True, False], ids=["spaces apart", "spaces in tokens"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return byte_level(request.param)


def rows_below(tree: SignalTree, node: int) -> list[int]:
    begin, count = int(tree.leaf_begin[node]), int(tree.leaf_count[node])
    return tree.leaf_row[tree.leaf_order[begin : begin + count]].tolist()


def read(tree: SignalTree, text: str, offsets: list[tuple[int, int]]) -> list[object]:
    """Return each paragraph as a list of its sentences, and each leaf under the root as its row."""
    result: list[object] = []
    for top in range(1, 1 + int(tree.child_count[0])):
        if tree.leaf_row[top] >= 0:
            result.append(int(tree.leaf_row[top]))
            continue
        first, count = int(tree.first_child[top]), int(tree.child_count[top])
        sentences = []
        for node in range(first, first + count):
            rows = rows_below(tree, node)
            sentences.append(text[offsets[rows[0]][0] : offsets[rows[-1]][1]].strip())
        result.append(sentences)
    return result


def test_tokens_hang_under_their_sentences_and_special_tokens_under_the_root(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tree = SignalTree.from_text(TEXT, tokenizer)
    tree.validate()
    encoding = tokenizer(TEXT, return_offsets_mapping=True)
    last = len(encoding["input_ids"]) - 1
    assert tree.num_rows == tree.num_leaves == last + 1
    assert read(tree, TEXT, encoding["offset_mapping"]) == [0, *SENTENCES, last]
    assert tree.leaf_row[tree.leaf_order].tolist() == list(range(last + 1))


def test_an_encoding_does_what_its_tokenizer_does(tokenizer: PreTrainedTokenizerFast) -> None:
    tree = SignalTree.from_text(TEXT, tokenizer)
    encoding = tokenizer(TEXT, return_offsets_mapping=True)
    assert SignalTree.from_text(TEXT, encoding=encoding) == tree
    assert SignalTree.from_text(TEXT, encoding=encoding[0]) == tree
    assert SignalTree.from_text(TEXT, encoding=dict(encoding)) == tree
    tensors = tokenizer(TEXT, return_offsets_mapping=True, return_tensors="pt")
    assert SignalTree.from_text(TEXT, encoding=tensors) == tree
    assert SignalTree.from_text(TEXT, encoding=dict(tensors)) == tree


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_rows_but_no_leaves(side: str) -> None:
    tokenizer = byte_level(True)
    tokenizer.padding_side = side
    encoding = tokenizer([TEXT, TEXT + TEXT], padding=True)
    tree = SignalTree.from_text(TEXT, encoding=encoding[0])
    mask = torch.tensor(encoding["attention_mask"][0]).bool()
    assert tree.num_rows == len(mask) > tree.num_leaves
    assert ((tree.row_node >= 0) == mask).all()
    shape = SignalTree.from_text(TEXT, tokenizer)
    assert tree.parent.tolist() == shape.parent.tolist()


def test_a_truncated_encoding_gives_the_tree_of_what_is_left() -> None:
    tokenizer = byte_level(True)
    encoding = tokenizer(TEXT, truncation=True, max_length=6, return_offsets_mapping=True)
    tree = SignalTree.from_text(TEXT, encoding=encoding)
    assert tree.num_leaves == 6
    assert int(tree.child_count[0]) == 3


def test_a_bytewise_tokenizer_needs_no_offsets() -> None:
    tree = SignalTree.from_text(TEXT, ByT5Tokenizer())
    tree.validate()
    data = TEXT.encode()
    assert tree.num_rows == len(data) + 1
    found = [
        bytes(data[row] for row in rows_below(tree, node)).decode().strip()
        for node in range(tree.num_nodes)
        if tree.depth[node] == 2
    ]
    assert found == [sentence for paragraph in SENTENCES for sentence in paragraph]
    assert int(tree.leaf_row[int(tree.child_count[0])]) == len(data)


def test_text_without_words_still_has_its_special_tokens() -> None:
    tree = SignalTree.from_text("", byte_level(True))
    assert tree.parent.tolist() == [-1, 0, 0]
    assert SignalTree.from_text("", ByT5Tokenizer()).num_leaves == 1


def test_a_token_belongs_to_the_sentence_where_it_starts() -> None:
    text = "One. Two."
    spans = [(0, 0), (0, 3), (3, 6), (6, 8), (8, 9), (0, 0)]
    tree = SignalTree.from_text(text, encoding={"offset_mapping": spans})
    assert [rows_below(tree, n) for n in range(tree.num_nodes) if tree.depth[n] == 2] == [
        [1, 2],
        [3, 4],
    ]


def test_a_special_token_amid_a_sentence_divides_it_and_rows_stay_in_order() -> None:
    spans = [(0, 3), (0, 0), (4, 7)]
    tree = SignalTree.from_text("one two", encoding={"offset_mapping": spans})
    tree.validate()
    assert tree.leaf_row[tree.leaf_order].tolist() == [0, 1, 2]
    assert tree.child_count.tolist()[:4] == [3, 1, 0, 1]


def test_sentences_may_be_split_by_any_function() -> None:
    def by_comma(text: str) -> list[tuple[int, int]]:
        parts = text.split(",")
        starts = [sum(len(part) + 1 for part in parts[:i]) for i in range(len(parts))]
        return [(start, start + len(part)) for start, part in zip(starts, parts, strict=True)]

    tree = SignalTree.from_text("a,b,c", ByT5Tokenizer(), split_sentences=by_comma)
    assert [rows_below(tree, n) for n in range(tree.num_nodes) if tree.depth[n] == 2] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    whole = SignalTree.from_text("a,b,c", ByT5Tokenizer(), split_sentences=lambda text: [])
    assert int((whole.depth == 2).sum()) == 1


@pytest.mark.parametrize("spans", [[(3, 4), (1, 2)], [(-1, 2)], [(0, 1), (99, 100)]])
def test_sentences_out_of_order_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"split_sentences must return .* got a sentence at"):
        SignalTree.from_text("abcdef", ByT5Tokenizer(), split_sentences=lambda text: spans)


class NoOffsets:
    is_fast = False

    def tokenize(self, text: str) -> list[str]:
        return text.split()


def test_what_cannot_be_aligned_is_refused_with_the_reason() -> None:
    tokenizer = byte_level(True)
    with pytest.raises(ValueError, match="NoOffsets gives no offsets and its tokens are not"):
        SignalTree.from_text("a b", NoOffsets())
    with pytest.raises(ValueError, match="ByT5Tokenizer gives no offsets"):
        SignalTree.from_text("a </s> b", ByT5Tokenizer())
    with pytest.raises(ValueError, match="object gives no offsets"):
        SignalTree.from_text("", object())
    with pytest.raises(TypeError, match=r"tokenizer must be given .*, got None"):
        SignalTree.from_text("a b")
    with pytest.raises(TypeError, match="text must be str, got list"):
        SignalTree.from_text(["a"], tokenizer)
    with pytest.raises(ValueError, match="encoding must be of one text, got 2"):
        SignalTree.from_text("a", encoding=tokenizer(["a", "b"]))
    with pytest.raises(ValueError, match="encoding must be of one text, got a pair"):
        SignalTree.from_text("a", encoding=tokenizer("a", "b"))
    with pytest.raises(ValueError, match="encoding must have offset_mapping, got input_ids"):
        SignalTree.from_text("a", encoding={"input_ids": [1]})
    with pytest.raises(TypeError, match=r"encoding must be .*, got list"):
        SignalTree.from_text("a", encoding=[1, 2])
    with pytest.raises(ValueError, match=r"token 1 has offsets \[1, 9\] in a text of 3 characters"):
        SignalTree.from_text("abc", encoding={"offset_mapping": [(0, 1), (1, 9)]})
    with pytest.raises(ValueError, match="text must have at least one token"):
        SignalTree.from_text("", encoding={"offset_mapping": []})
    with pytest.raises(ValueError, match="an offset for each of 3 input_ids, got 1"):
        SignalTree.from_text("a", encoding={"offset_mapping": [(0, 1)], "input_ids": [1, 2, 3]})
    with pytest.raises(
        ValueError, match=r"attention_mask of encoding must have 1 values, .* got 2"
    ):
        SignalTree.from_text("a", encoding={"offset_mapping": [(0, 1)], "attention_mask": [1, 1]})


@given(st.text(alphabet="aB.!?… \n<br/>\"'é1", max_size=60))
def test_any_text_gives_a_valid_tree_in_the_order_of_its_tokens(text: str) -> None:
    tree = SignalTree.from_text(text, ByT5Tokenizer())
    tree.validate()
    assert tree.leaf_row[tree.leaf_order].tolist() == list(range(len(text.encode()) + 1))


@given(st.text(alphabet="aB.!?… \n<br/>\"'é1。", max_size=80))
def test_sentences_and_paragraphs_cover_the_text_without_gaps(text: str) -> None:
    for split in (split_paragraphs, split_sentences):
        spans = split(text)
        assert "".join(text[start:end] for start, end in spans) == text
        assert all(start < end for start, end in spans) or text == ""


@pytest.mark.parametrize(
    "sentences",
    [
        ["Mr. and Mrs. Smith met Dr. Jones.", "They talked."],
        ["It costs 3.14 dollars.", "Cheap!", "Is it?", "Yes."],
        ["Apples, e.g. Gala, i.e. red ones, etc. are fine.", "So are pears."],
        ["He said no... and left.", "Then...", "Nothing."],
        ["Wait… what?", "Yes…", "Really."],
        ['"Who is it?" she asked.', '"Me!" he said.'],
        ["He said “Go.”", "Then he left (quickly).", "Good."],
        ["J. R. R. Tolkien wrote it.", "I read it."],
        ["He lives in the U.S. Army base at 5 p.m. every day.", "Fine."],
        ["She moved to the U.S.", "The weather is better."],
        ["It was you and I.", "Then it ended."],
        ["See Fig. 3 and No. 7 on p. 12.", "No.", "That is all."],
        ["1. First of all.", "2. Second."],
        ["a bad film. ", "really bad! ", "i hated it."],
        ["I watch Jeopardy! every day.", "You?"],
        ["He works at Acme Inc. Paris.", "Good."],
        ["He works at Acme Inc.", "The pay is good."],
        ["Visit www.site.com today.", "Version 2.0.1 is out."],
        ["One line<br />", "another line<br />", "the third."],
        ["What?!", "No!!!", "Yes."],
        ["今天好。", "明天呢\uff1f", "「好\uff01」", "走吧。"],
        ["no end mark"],
        ["... and so it began.", "It ended."],
    ],
)
def test_sentences_end_where_a_careful_reader_ends_them(sentences: list[str]) -> None:
    sentences = [sentence.strip() for sentence in sentences]
    joiner = "" if "。" in sentences[0] else " "
    text = joiner.join(sentences)
    assert [text[start:end].strip() for start, end in split_sentences(text)] == sentences


def test_paragraphs_end_at_blank_lines_and_doubled_breaks() -> None:
    text = "One.\nStill one.<br /><br />Two.\n \nThree.<br>Still three.\r\n\r\nFour.\n\n"
    found = [text[start:end].strip() for start, end in split_paragraphs(text)]
    assert found == ["One.\nStill one.<br /><br />", "Two.", "Three.<br>Still three.", "Four."]


def test_long_texts_without_words_are_split_in_linear_time() -> None:
    begin = time.perf_counter()
    for part in ("! ", "... ", "<br />", "\n", "\n ", " ", ".", '"', '."', "<br ", "5. a ", "。"):
        split_sentences(part * 100_000)
        split_paragraphs(part * 100_000)
    assert time.perf_counter() - begin < 60


@pytest.mark.parametrize(
    "sentences",
    [
        ["यह पहला है। ", "यह दूसरा है॥ ", "तीसरा"],
        ["ما هذا؟ ", "هذا كتاب. ", "حسنا"],
        ["یہ پہلا ہے۔ ", "یہ دوسرا ہے۔"],
        ["Սա առաջինն է։ ", "Սա երկրորդն է։"],
        ["ይህ ነው።", "ሌላ ነው። ", "ሦስት"],
        ["这是一。", "“这是二！”", "（三？）", "四"],
        ["これは一。", "「これは二！」", "三"],
        ["នេះ។ ", "នោះ។"],
        ["ဒါ။ ", "ဟို။"],
        ["سؤال؟! ", "جواب۔"],
    ],
)
def test_the_sentence_ends_of_every_script_count(sentences: list[str]) -> None:
    text = "".join(sentences)
    assert [text[begin:end] for begin, end in split_sentences(text)] == sentences


def test_two_thousand_hindi_sentences_are_no_single_family() -> None:
    tree = SignalTree.from_text("यह है। " * 2000, ByT5Tokenizer(), max_family=None)
    assert sum(1 for depth in tree.depth.tolist() if depth == 2) == 2000


def test_a_text_without_sentence_ends_is_split_into_windows_with_a_warning() -> None:
    text = "word " * 1000
    with pytest.warns(UserWarning, match="a family of 5,000 members is split into windows of 64"):
        tree = SignalTree.from_text(text, ByT5Tokenizer())
    tree.validate()
    assert int(tree.child_count.max()) <= 1024
    whole = SignalTree.from_text(text, ByT5Tokenizer(), max_family=None)
    assert int(whole.child_count.max()) == 5000
    assert tree.leaf_row[tree.leaf_order].equal(whole.leaf_row[whole.leaf_order])


def test_tokens_know_their_places_in_the_text_whatever_becomes_of_the_tree(tmp_path: Path) -> None:
    tree = SignalTree.from_text(TEXT, ByT5Tokenizer())
    offsets = tree.source_offsets
    assert offsets is not None
    assert TEXT[int(offsets[1, 0]) : int(offsets[1, 1])] == "é"
    assert offsets[-1].tolist() == [-1, -1]  # the special token
    plain = SignalTree.from_windows(3)
    forest = SignalTree.batch([tree, plain])
    assert forest.source_offsets is not None
    assert (forest.source_offsets[-3:] == -1).all()
    again = forest.unbatch()[0].source_offsets
    assert again is not None
    assert again.equal(offsets)
    keep = torch.arange(tree.num_rows) > 2
    for same in (tree.prune(keep), tree.collapse(), tree.flatten(), tree.with_modality("x")):
        assert same.source_offsets is not None
        assert same.source_offsets.equal(offsets)
    smaller, _ = tree.pool_leaves()
    assert smaller.source_offsets is not None
    begin, end = smaller.source_offsets[0].tolist()
    assert TEXT[begin:end] == "Héllo there. "
    for suffix in (".json", ".safetensors"):
        tree.save(tmp_path / f"tree{suffix}")
        loaded = SignalTree.load(tmp_path / f"tree{suffix}").source_offsets
        assert loaded is not None
        assert loaded.equal(offsets)
    with pytest.raises(ValueError, match=r"source_offsets of row 0 must be .* got \[5, 2\]"):
        replace(plain, source_offsets=torch.tensor([[5, 2], [0, 1], [1, 2]])).validate()
