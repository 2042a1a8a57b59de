"""Every error names the argument, what it got and what it takes."""

from typing import Any

import pytest
import torch

from polyscale.ops.hsa import hsa_attention, hsa_energy, hsa_matrix
from polyscale.trees import SignalTree

TREE = SignalTree.from_parents([-1, 0, 0, 1, 1])  # 3 rows, 5 nodes, 2 depths of families


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tie": "rows"}, ValueError, r"tie must .*one of \"blocks\", \"columns\".*got 'rows'"),
        ({"impl": "cuda"}, ValueError, r"impl must .*one of \"auto\".*got 'cuda'"),
        ({"causal": 1}, TypeError, "causal must .*True or False.*got 1"),
        ({"include_self": None}, TypeError, "include_self must .*True or False.*got None"),
        ({"tree": [0, 1, 2]}, TypeError, "tree must .*a SignalTree.*got list"),
        ({"query": [1.0]}, TypeError, "query must .*a tensor.*got list"),
        ({"query": ones(1, 2, 3, 4).long()}, TypeError, "query must .*a float.*got torch.int64"),
        ({"key": ones(1, 2, 3, 4).double()}, TypeError, "key must .*the dtype.*got torch.float64"),
        ({"query": ones(3, 4)}, ValueError, r"query must .*\[B, H, N, D\].*got \[3, 4\]"),
        ({"value": ones(2, 3, 4)}, ValueError, r"value must .*\[1, 2, 3\].*got \[2, 3, 4\]"),
        ({"key": ones(1, 2, 3, 5)}, ValueError, "key must have the width of query, 4, got 5"),
        (
            {"key": ones(1, 1, 3, 4)},
            ValueError,
            r"key must .*\[1, 2, 3\].*got \[1, 1, 3, 4\]",
        ),
        ({"position_scores": ones(4, 2)}, ValueError, r"position_scores must .*got \[4, 2\]"),
        ({"position_scores": ones(3, 5, 2)}, ValueError, r"H or 1, M, P\] with H = 2 and M = 5"),
        ({"position_scores": ones(5)}, ValueError, r"position_scores must .*got \[5\]"),
        (
            {"position_scores": ones(5, 2).long()},
            TypeError,
            "position_scores must .*got torch.int64",
        ),
        ({"position_scores": (ones(5, 2),)}, TypeError, "must be a tensor or a pair of tensors"),
        (
            {"position_scores": (ones(5, 2), ones(5, 3))},
            ValueError,
            "position_scores must .*got 2 and 3",
        ),
        ({"key_padding_mask": ones(1, 3)}, TypeError, "key_padding_mask must .*got torch.float32"),
        (
            {"key_padding_mask": ones(3).bool()},
            ValueError,
            r"key_padding_mask must .*\[1, 3\].*got \[3\]",
        ),
        ({"scale": float("nan")}, ValueError, "scale must .*a finite number.*got nan"),
        ({"scale": "big"}, ValueError, "scale must .*a finite number.*got 'big'"),
        ({"alpha": 0.5}, ValueError, "alpha must .*a number >= 1.*got 0.5"),
        ({"alpha": float("inf")}, ValueError, "alpha must .*got inf"),
        ({"alpha": "1.5"}, TypeError, "alpha must .*got '1.5'"),
        ({"alpha": ones(1)}, ValueError, r"alpha must .* each of the 2 depths.*, got shape \[1\]"),
        ({"alpha": torch.tensor([1.5, 0.9])}, ValueError, "alpha must be a number"),
        ({"alpha": torch.tensor([2, 2])}, TypeError, "alpha must .*got a tensor of torch.int64"),
        ({"causal": True}, ValueError, 'causal=True needs tie="columns"'),
    ],
)
def test_bad_arguments_are_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "query": ones(1, 2, 3, 4),
        "key": ones(1, 2, 3, 4),
        "value": ones(1, 2, 3, 4),
        "tree": TREE,
    }
    with pytest.raises(error, match=message):
        hsa_attention(**{**arguments, **changes})


def test_the_number_of_rows_must_be_that_of_the_tree() -> None:
    with pytest.raises(ValueError, match=r"query must have the tree's 3 rows, got 4"):
        hsa_attention(ones(1, 2, 4, 4), ones(1, 2, 4, 4), ones(1, 2, 4, 4), TREE)


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="width of at least 1"):
        hsa_attention(ones(1, 2, 3, 0), ones(1, 2, 3, 0), ones(1, 2, 3, 4), TREE)


def test_a_tree_on_another_device_is_refused() -> None:
    query = ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"tree: is on meta, query is on cpu; move it with"):
        hsa_attention(query, query, query, TREE.to("meta"))


def test_the_matrix_names_its_own_arguments() -> None:
    with pytest.raises(ValueError, match=r"query must .*got \[3, 4\]"):
        hsa_matrix(ones(3, 4), ones(3, 4), TREE)
    with pytest.raises(TypeError, match=r"query must .*got torch\.int64"):
        hsa_matrix(ones(1, 3, 4).long(), ones(1, 3, 4), TREE)
    with pytest.raises(TypeError, match=r"query must .*got list"):
        hsa_matrix([1.0], ones(1, 3, 4), TREE)  # type: ignore[arg-type]


def test_the_energy_has_no_certificate_for_entmax() -> None:
    query = ones(1, 3, 4)
    with pytest.raises(ValueError, match="certificate needs alpha=1"):
        hsa_energy(query, query, TREE, alpha=1.5)
    assert hsa_energy(query, query, TREE, alpha=1.5, certificate=False).kl is None


def test_a_log_partition_of_another_shape_is_refused() -> None:
    query = ones(1, 3, 4)
    with pytest.raises(ValueError, match=r"log_partition must .*\[1, 3\].*got \[3\]"):
        hsa_energy(query, query, TREE, log_partition=ones(3))
    with pytest.raises(ValueError, match="log_partition: given with certificate=False"):
        hsa_energy(query, query, TREE, log_partition=ones(1, 3), certificate=False)
