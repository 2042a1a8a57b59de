"""Every bad argument is refused with its name, what it got and what it takes."""

import pytest
import torch

import polyscale as ps
from tests.ops.hkt.cases import random_case


def arguments(**changes):
    queries, keys, value, weights = random_case(8, 3, dtype=torch.float32)
    given = {"queries": queries, "keys": keys, "value": value, "level_weights": weights}
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    return given


def with_level(level, change):
    return lambda tensors: [change(t) if i == level else t for i, t in enumerate(tensors)]


MASK = torch.zeros(2, 8, dtype=torch.bool)

REFUSED = [
    ("one tensor for all levels", {"queries": torch.zeros(2, 2, 8, 4)}, TypeError, "queries"),
    ("no levels", {"queries": [], "keys": []}, ValueError, "queries"),
    ("level counts differ", {"keys": lambda k: k[:2]}, ValueError, "queries and keys.*3 and 2"),
    ("not a tensor", {"value": [1.0]}, TypeError, "value"),
    ("not a tensor in a level", {"keys": with_level(1, lambda k: None)}, TypeError, r"keys\[1\]"),
    ("three dimensions", {"value": lambda v: v[0]}, ValueError, r"value.*4 dimensions"),
    ("coarse length", {"keys": with_level(1, lambda k: k[:, :, :3])}, ValueError, r"keys\[1\].*4"),
    ("fine length", {"value": lambda v: v[:, :, :7]}, ValueError, r"queries\[0\].*7"),
    ("batch", {"value": lambda v: v[:1]}, ValueError, r"queries\[0\].*\(1, 2\)"),
    ("heads", {"keys": with_level(2, lambda k: k[:, :1])}, ValueError, r"keys\[2\]"),
    ("head width", {"keys": with_level(2, lambda k: k[..., :3])}, ValueError, r"keys\[2\].*4.*3"),
    ("integers", {"value": lambda v: v.long()}, TypeError, "value.*int64"),
    (
        "dtype mix",
        {"queries": with_level(0, lambda q: q.double())},
        TypeError,
        r"queries\[0\].*float32.*float64",
    ),
    (
        "device mix",
        {"keys": with_level(1, lambda k: k.to("meta"))},
        ValueError,
        r"keys\[1\].*cpu.*meta",
    ),
    ("weights too many", {"level_weights": torch.ones(4)}, ValueError, r"level_weights.*3.*4"),
    ("weights by head", {"level_weights": torch.ones(3, 3)}, ValueError, "level_weights"),
    ("weights list", {"level_weights": [0.5, 0.3, 0.2]}, TypeError, "level_weights"),
    ("weights dtype", {"level_weights": torch.ones(3).double()}, TypeError, "level_weights"),
    (
        "weights device",
        {"level_weights": torch.ones(3, device="meta")},
        ValueError,
        "level_weights",
    ),
    ("weights nan", {"level_weights": torch.tensor([1.0, float("nan"), 0.0])}, ValueError, "nan"),
    ("weights inf", {"level_weights": torch.tensor([1.0, float("inf"), 0.0])}, ValueError, "inf"),
    ("mask dtype", {"key_padding_mask": MASK.float()}, TypeError, "key_padding_mask.*float32"),
    ("mask shape", {"key_padding_mask": MASK[:, :7]}, ValueError, r"key_padding_mask.*\[2, 8\]"),
    ("mask device", {"key_padding_mask": MASK.to("meta")}, ValueError, "key_padding_mask.*meta"),
    ("scale", {"scale": "big"}, TypeError, "scale"),
    ("impl", {"impl": "magic"}, ValueError, "impl.*'reference'.*'magic'"),
    ("bias count", {"relative_bias": [torch.zeros(2, 3)]}, ValueError, "relative_bias"),
    ("bias shape", {"relative_bias": [torch.zeros(2, 4)] * 3}, ValueError, r"relative_bias\[0\]"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_bad_argument_is_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        ps.hkt_attention(**arguments(**changes))


def test_an_empty_sequence_is_refused():
    empty = torch.zeros(1, 2, 0, 4)
    with pytest.raises(ValueError, match="empty sequence"):
        ps.hkt_attention([empty], [empty], empty, torch.ones(1))


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        ([0.0, 8.0], TypeError, "int32 or int64"),
        ([8], ValueError, r"\[sequences \+ 1\]"),
        ([0, 3, 7], ValueError, "rise from 0 to T = 8"),
        ([1, 8], ValueError, "rise from 0"),
        ([0, 3, 3, 8], ValueError, "no sequence empty"),
        ([0, 5, 3, 8], ValueError, "rise"),
    ],
)
def test_bad_boundaries_of_packed_sequences_are_refused(bounds, error, message):
    x = torch.zeros(1, 2, 8, 4)
    with pytest.raises(error, match=message):
        ps.hkt_attention([x], [x], x, torch.ones(1), cu_seqlens=torch.tensor(bounds))


def test_packed_sequences_go_in_one_row_and_without_a_mask():
    x, bounds = torch.zeros(2, 2, 8, 4), torch.tensor([0, 8])
    with pytest.raises(ValueError, match="B = 2"):
        ps.hkt_attention([x], [x], x, torch.ones(1), cu_seqlens=bounds)
    with pytest.raises(ValueError, match="not both"):
        ps.hkt_attention([x], [x], x, torch.ones(1), cu_seqlens=bounds, key_padding_mask=MASK)


def test_packed_levels_of_the_wrong_length_are_refused():
    fine, coarse = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 4, 4)
    with pytest.raises(ValueError, match=r"queries\[1\].*= 5 positions"):
        ps.hkt_attention(
            [fine, coarse], [fine, coarse], fine, torch.ones(2), cu_seqlens=torch.tensor([0, 3, 8])
        )
