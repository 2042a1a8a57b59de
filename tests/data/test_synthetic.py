import pytest
import torch
from torch.nn.functional import cross_entropy

from polyscale.data.tasks import load_task

PARTS = ("train", "validation", "test")


def recall_by_hand(ids):
    """Answers by looking keys up from left to right, as a reader of the sequence would."""
    memory, answers = {}, {}
    previous = None
    for position, token in enumerate(ids):
        if previous in memory and memory[previous] is not None:
            answers[position] = memory[previous]
        elif previous is not None and 2 <= previous < 32 and token >= 32:
            memory[previous] = token
        previous = token
    return answers


def loss_of(answers, labels, vocab):
    """Causal loss as Hugging Face models take it: scores at t are about the label at t + 1."""
    scores = torch.zeros(len(labels), vocab)
    for position, token in answers.items():
        scores[position - 1, token] = 50.0
    return cross_entropy(scores[:-1], labels[1:], ignore_index=-100).item()


@pytest.fixture(scope="module")
def recall():
    return load_task(
        "mqar", vocab=64, pairs=[3, 5], length=41, train=300, validation=40, test=60, seed=3
    )


def test_recall_is_solved_by_looking_keys_up(recall):
    for part in PARTS:
        split = getattr(recall, part)
        for index in range(len(split)):
            sample = split[index]
            ids, labels = sample["input_ids"].tolist(), sample["labels"]
            asked = {place: token for place, token in enumerate(labels.tolist()) if token != -100}
            assert recall_by_hand(ids) == asked
            assert loss_of(asked, labels, 64) < 1e-6
            wrong = {place: token ^ 1 for place, token in asked.items()}
            assert loss_of(wrong, labels, 64) > 40


def test_every_key_comes_twice_and_every_value_stands_where_it_is_asked(recall):
    for index in range(len(recall.train)):
        ids, labels = recall.train[index]["input_ids"], recall.train[index]["labels"]
        pairs = int(recall.train.groups["pairs"][index])
        keys = ids[0 : 2 * pairs : 2].tolist()
        assert len(set(keys)) == pairs
        assert all(2 <= key < 32 for key in keys)
        values = ids[1 : 2 * pairs : 2].tolist()
        assert all(32 <= value < 64 for value in values)
        places = (labels != -100).nonzero().flatten()
        assert len(places) == pairs
        assert places.min() > 2 * pairs
        asked = {int(ids[place - 1]): int(ids[place]) for place in places}
        assert asked == dict(zip(keys, values, strict=True))
        assert (ids == 1).sum() == 41 - 4 * pairs  # the rest is filler


def test_every_number_of_pairs_is_about_as_frequent(recall):
    counts = torch.bincount(recall.train.groups["pairs"])
    assert counts.sum() == 300
    assert abs(int(counts[3]) - int(counts[5])) < 80  # four standard deviations are 69


def test_one_number_of_pairs_is_no_group():
    task = load_task("mqar", pairs=4, train=10, validation=2, test=2)
    assert list(task.train.groups) == ["length"]


def query_places(power):
    task = load_task("mqar", pairs=4, length=136, power=power, train=2_000, validation=1, test=1)
    places = [(task.train[i]["labels"] != -100).nonzero().flatten() for i in range(2_000)]
    return (torch.cat(places).double() - 9) / 2  # 0 .. 63


def test_queries_are_spread_evenly_or_come_soon_by_the_power():
    even, soon = query_places(1.0), query_places(0.01)
    assert even.mean().item() == pytest.approx(31.5, abs=1)  # deviation of the mean: 0.2
    rates = torch.arange(1, 65).double() ** -0.99
    first = (soon == 0).sum().item() / 2_000
    # How often the likeliest place is among four drawn by weight without repeats, by simulation.
    generator = torch.Generator().manual_seed(1)
    drawn = torch.multinomial(rates.expand(20_000, 64), 4, generator=generator)
    assert first == pytest.approx((drawn == 0).any(1).double().mean().item(), abs=0.04)
    assert soon.mean() < 20


def test_queries_can_fill_the_whole_sequence():
    task = load_task("mqar", vocab=20, pairs=8, length=32, train=50, validation=5, test=5)
    assert (task.train[0]["labels"] != -100).sum() == 8
    assert not (task.train[0]["input_ids"] == 1).any()


def test_copying_is_solved_by_copying():
    task = load_task("copy", vocab=7, length=9, train=100, validation=10, test=20)
    assert task.max_length == 19
    for part in PARTS:
        split = getattr(task, part)
        for index in range(len(split)):
            ids, labels = split[index]["input_ids"], split[index]["labels"]
            first = ids[:9]
            assert all(2 <= token < 7 for token in first.tolist())
            assert ids[9] == 1
            assert labels[:10].tolist() == [-100] * 10
            assert torch.equal(labels[10:], first)
            assert torch.equal(ids[10:], first)
            # Read at a position, the answer is nine places back: nothing else has to be known.
            answers = {place: int(ids[place - 10]) for place in range(10, 19)}
            assert loss_of(answers, labels, 7) < 1e-6


def test_all_tokens_are_used_evenly_in_copying():
    task = load_task("copy", vocab=6, length=50, train=400, validation=1, test=1)
    counts = torch.bincount(task.train.tokens[:, :50].flatten(), minlength=6)
    assert counts[:2].tolist() == [0, 0]
    assert counts[2:].min() > 0.96 * 5_000
    assert counts[2:].max() < 1.04 * 5_000


def test_all_sequences_that_exist_can_be_asked_for_but_not_more():
    sizes = {"train": 6, "validation": 1, "test": 1}
    task = load_task("copy", vocab=4, length=3, **sizes)  # 2 ** 3 sequences
    rows = torch.cat([getattr(task, part).tokens for part in PARTS])
    assert len(rows.unique(dim=0)) == 8
    with pytest.raises(ValueError, match="got 9, of which 8 were found"):
        load_task("copy", vocab=4, length=3, **{**sizes, "train": 7})


def test_text_shows_what_is_asked():
    task = load_task("copy", vocab=4, length=2, train=1, validation=1, test=1)
    a, b = task.test.tokens[0, :2].tolist()
    assert task.test.text(0) == f"{a} {b} 1 ({a}) ({b})"
    assert task.example == f"{a} {b} 1 ({a}) ({b}) -> the ids in parentheses"
