"""Batches, forests, masks and rows outside the tree give what separate trees give."""

from typing import Any

import pytest
import torch

from polyscale.ops.hsa import api, hsa_attention
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import (
    KINDS,
    assert_paths_agree,
    bushy_tree,
    kind_name,
    output_and_gradients,
    random_inputs,
    random_tree,
)

every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)


@every_kind
def test_a_forest_is_its_trees_one_by_one(kind: dict[str, Any]) -> None:
    trees = [random_tree(seed) for seed in range(30, 42)]
    forest = SignalTree.batch([*trees, SignalTree.from_parents([-1])])
    inputs = random_inputs(forest, 0)
    tensors = inputs.tensors()[:3]
    output = hsa_attention(*tensors, forest, **kind)
    for at, tree in enumerate([*trees, SignalTree.from_parents([-1])]):
        rows = slice(forest.tree_rows[at], forest.tree_rows[at + 1])
        alone = hsa_attention(*(part[:, rows] for part in tensors), tree, **kind)
        torch.testing.assert_close(output[:, rows], alone, atol=1e-12, rtol=0)


@every_kind
def test_a_forest_has_the_gradients_of_the_reference(kind: dict[str, Any]) -> None:
    for seed in range(5):
        trees = [random_tree(seed + 10 * at) for at in range(3)]
        forest = SignalTree.batch([*trees, SignalTree.from_parents([-1])])
        assert_paths_agree(random_inputs(forest, seed), forest, **kind)


@every_kind
def test_packed_is_dense(kind: dict[str, Any]) -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0, lead=(3, 2))
    tensors = inputs.tensors()[:3]
    dense = hsa_attention(*tensors, tree, position_scores=inputs.position_scores, **kind)
    forest = SignalTree.batch([tree, tree, tree])
    packed = hsa_attention(
        *(part.transpose(0, 1).flatten(1, 2) for part in tensors), forest, **kind
    )
    plain = hsa_attention(*tensors, tree, **kind)
    torch.testing.assert_close(packed.unflatten(1, (3, -1)).transpose(0, 1), plain)
    for at in range(3):
        alone = hsa_attention(
            *(part[at] for part in tensors), tree, position_scores=inputs.position_scores, **kind
        )
        torch.testing.assert_close(dense[at], alone, atol=1e-12, rtol=0)


@every_kind
def test_a_mask_is_the_pruned_tree(kind: dict[str, Any]) -> None:
    generator = torch.manual_seed(0)
    for seed in range(30):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed, lead=(2, 1))
        ignored = torch.rand(2, tree.num_rows, generator=generator) < 0.4
        ignored[0, -1] = False
        ignored[1] = True  # an entry without any row left
        tensors = inputs.tensors()[:3]
        output = hsa_attention(*tensors, tree, key_padding_mask=ignored, **kind)
        pruned = tree.prune(~ignored[0])
        expected = hsa_attention(*(part[:1] for part in tensors), pruned, **kind)
        torch.testing.assert_close(output[:1], expected, atol=1e-12, rtol=0)
        assert (output[1] == 0).all()
        assert (output[0][:, ignored[0]] == 0).all()
        if output.requires_grad:
            ours = torch.autograd.grad(output.square().sum(), tensors, allow_unused=True)
            for gradient in ours:
                assert gradient is None or torch.isfinite(gradient).all()


@every_kind
def test_a_mask_agrees_with_the_reference_in_all_gradients(kind: dict[str, Any]) -> None:
    generator = torch.manual_seed(0)
    for seed in range(12):
        tree = random_tree(seed)
        ignored = torch.rand(2, tree.num_rows, generator=generator) < 0.4
        inputs = random_inputs(tree, seed, lead=(2, 2))
        assert_paths_agree(inputs, tree, key_padding_mask=ignored, **kind)


@every_kind
def test_masked_rows_may_hold_anything_even_nan(kind: dict[str, Any]) -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0, lead=(1, 2))
    ignored = torch.zeros(1, tree.num_rows, dtype=torch.bool)
    ignored[0, [1, 3]] = True
    expected, gradients = output_and_gradients(
        inputs, tree, "torch", key_padding_mask=ignored, **kind
    )
    with torch.no_grad():
        for part in inputs.tensors()[:3]:
            part[:, :, 1] = torch.nan
            part[:, :, 3] = torch.inf
    output, again = output_and_gradients(inputs, tree, "torch", key_padding_mask=ignored, **kind)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(again, gradients)


@every_kind
def test_a_packed_mask_has_one_entry_per_row(kind: dict[str, Any]) -> None:
    forest = SignalTree.batch([bushy_tree(), bushy_tree()])
    inputs = random_inputs(forest, 0)
    tensors = inputs.tensors()[:3]
    ignored = torch.zeros(forest.num_rows, dtype=torch.bool)
    ignored[::3] = True
    output = hsa_attention(*tensors, forest, key_padding_mask=ignored, **kind)
    expected = hsa_attention(*tensors, forest, impl="reference", key_padding_mask=ignored, **kind)
    torch.testing.assert_close(output, expected, atol=1e-9, rtol=0)


@every_kind
def test_working_in_parts_without_gradients_changes_nothing(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0, lead=(3, 4))
    ignored = torch.zeros(3, tree.num_rows, dtype=torch.bool)
    ignored[1, 2:] = True
    options = {"position_scores": inputs.position_scores, "key_padding_mask": ignored, **kind}
    arguments = (inputs.query, inputs.key, inputs.value, tree)
    expected = hsa_attention(*arguments, **options)
    bytes_per_copy = tree.num_rows * 3 * 8
    for copies in (1, 3, 4, 9):
        monkeypatch.setattr(api, "CHUNK_BYTES", copies * bytes_per_copy)
        with torch.no_grad():
            torch.testing.assert_close(hsa_attention(*arguments, **options), expected)


def test_an_empty_batch_gives_an_empty_result() -> None:
    tree = bushy_tree()
    query = torch.zeros(0, 2, tree.num_rows, 3)
    for kind in KINDS:
        assert hsa_attention(query, query, query, tree, **kind).shape == query.shape
