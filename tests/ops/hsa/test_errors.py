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
        ({"tie": "rows"}, ValueError, r"tie: got 'rows', takes one of \"blocks\", \"columns\""),
        ({"impl": "cuda"}, ValueError, r"impl: got 'cuda', takes one of \"auto\""),
        ({"causal": 1}, TypeError, "causal: got 1, takes True or False"),
        ({"include_self": None}, TypeError, "include_self: got None, takes True or False"),
        ({"tree": [0, 1, 2]}, TypeError, "tree: got list, takes a SignalTree"),
        ({"query": [1.0]}, TypeError, "query: got list, takes a tensor"),
        ({"query": ones(1, 2, 3, 4).long()}, TypeError, "query: got torch.int64, takes a float"),
        ({"key": ones(1, 2, 3, 4).double()}, TypeError, "key: got torch.float64, takes the dtype"),
        ({"query": ones(3, 4)}, ValueError, r"query: got shape \[3, 4\], takes \[B, H, N, D\]"),
        ({"value": ones(2, 3, 4)}, ValueError, r"value: got shape \[2, 3, 4\], takes \[1, 2, 3\]"),
        ({"key": ones(1, 2, 3, 5)}, ValueError, "key: got width 5, takes that of query, 4"),
        (
            {"key": ones(1, 1, 3, 4)},
            ValueError,
            r"key: got shape \[1, 1, 3, 4\], takes \[1, 2, 3\]",
        ),
        ({"position_scores": ones(4, 2)}, ValueError, r"position_scores: got shape \[4, 2\]"),
        ({"position_scores": ones(3, 5, 2)}, ValueError, r"H or 1, M, P\] with H = 2 and M = 5"),
        ({"position_scores": ones(5)}, ValueError, r"position_scores: got shape \[5\]"),
        ({"position_scores": ones(5, 2).long()}, TypeError, "position_scores: got torch.int64"),
        ({"position_scores": (ones(5, 2),)}, TypeError, "takes a tensor or a pair of tensors"),
        (
            {"position_scores": (ones(5, 2), ones(5, 3))},
            ValueError,
            "position_scores: got widths 2 and 3",
        ),
        ({"key_padding_mask": ones(1, 3)}, TypeError, "key_padding_mask: got torch.float32"),
        (
            {"key_padding_mask": ones(3).bool()},
            ValueError,
            r"key_padding_mask: got shape \[3\], takes \[1, 3\]",
        ),
        ({"scale": float("nan")}, ValueError, "scale: got nan, takes a finite number"),
        ({"scale": "big"}, ValueError, "scale: got 'big', takes a finite number"),
        ({"alpha": 0.5}, ValueError, "alpha: got 0.5, takes a number >= 1"),
        ({"alpha": float("inf")}, ValueError, "alpha: got inf"),
        ({"alpha": "1.5"}, TypeError, "alpha: got '1.5'"),
        ({"alpha": ones(1)}, ValueError, r"alpha: got shape \[1\], .* each of the 2 depths"),
        ({"alpha": torch.tensor([1.5, 0.9])}, ValueError, "alpha: got"),
        ({"alpha": torch.tensor([2, 2])}, TypeError, "alpha: got a tensor of torch.int64"),
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
    with pytest.raises(ValueError, match=r"query: got 4 rows .* takes the tree's 3"):
        hsa_attention(ones(1, 2, 4, 4), ones(1, 2, 4, 4), ones(1, 2, 4, 4), TREE)


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="width of at least 1"):
        hsa_attention(ones(1, 2, 3, 0), ones(1, 2, 3, 0), ones(1, 2, 3, 4), TREE)


def test_a_tree_on_another_device_is_refused() -> None:
    query = ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"tree: is on meta, query is on cpu; move it with"):
        hsa_attention(query, query, query, TREE.to("meta"))


def test_the_matrix_names_its_own_arguments() -> None:
    with pytest.raises(ValueError, match=r"query: got shape \[3, 4\]"):
        hsa_matrix(ones(3, 4), ones(3, 4), TREE)
    with pytest.raises(TypeError, match=r"query: got torch\.int64"):
        hsa_matrix(ones(1, 3, 4).long(), ones(1, 3, 4), TREE)
    with pytest.raises(TypeError, match="query: got list"):
        hsa_matrix([1.0], ones(1, 3, 4), TREE)  # type: ignore[arg-type]


def test_the_energy_has_no_certificate_for_entmax() -> None:
    query = ones(1, 3, 4)
    with pytest.raises(ValueError, match="certificate needs alpha=1"):
        hsa_energy(query, query, TREE, alpha=1.5)
    assert hsa_energy(query, query, TREE, alpha=1.5, certificate=False).kl is None


def test_a_log_partition_of_another_shape_is_refused() -> None:
    query = ones(1, 3, 4)
    with pytest.raises(ValueError, match=r"log_partition: got shape \[3\], takes \[1, 3\]"):
        hsa_energy(query, query, TREE, log_partition=ones(3))
    with pytest.raises(ValueError, match="log_partition: given with certificate=False"):
        hsa_energy(query, query, TREE, log_partition=ones(1, 3), certificate=False)
