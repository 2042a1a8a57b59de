"""Strict causality, and why it needs columns."""

import pytest
import torch

from polyscale.ops.hsa import hsa_attention, reference
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import bushy_tree, random_inputs, random_tree


@pytest.mark.parametrize("include_self", [True, False])
def test_no_row_depends_on_a_later_row_for_every_pair_of_leaves(include_self: bool) -> None:
    for seed in range(25):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed, lead=(1,))
        output = hsa_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            tree,
            tie="columns",
            causal=True,
            include_self=include_self,
            position_scores=inputs.position_scores,
        )
        for row in range(tree.num_rows):
            if not output.requires_grad:
                continue
            gradients = torch.autograd.grad(
                output[:, row].sum(),
                inputs.tensors()[:3],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for gradient in gradients:
                assert (gradient[:, row + 1 :] == 0).all()
            if include_self:
                assert (gradients[2][:, : row + 1].abs().sum(-1) > 0).all()


def test_later_rows_can_hold_anything() -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0)
    tensors = [part.detach() for part in inputs.tensors()[:3]]
    before = hsa_attention(*tensors, tree, tie="columns", causal=True)
    for row in range(1, tree.num_rows):
        changed = [part.clone() for part in tensors]
        for part in changed:
            part[:, row:] = 1e3
        after = hsa_attention(*changed, tree, tie="columns", causal=True)
        torch.testing.assert_close(after[:, :row], before[:, :row], atol=1e-12, rtol=0)


def masked_siblings(query: torch.Tensor, key: torch.Tensor, root: reference.Node) -> torch.Tensor:
    """Return the block-tied matrix [N, N] when each family merely hides later siblings."""
    matrix = query.new_zeros(query.shape[0], query.shape[0])

    def energy(node: reference.Node) -> torch.Tensor:
        if node.row is not None:
            return -(query[node.row] * key[node.row]).sum()
        parts = [
            len(one.rows()) * family(node, place)[1] for place, one in enumerate(node.children)
        ]
        return -torch.stack(parts).sum() / len(node.rows())

    def family(node: reference.Node, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        mean = query[node.children[place].rows()].mean(0)
        logits = [-energy(node.children[place])]
        for other in node.children[:place]:
            rows = other.rows()
            logits.append((mean * key[rows].mean(0)).sum() + torch.tensor(len(rows)).log())
        stacked = torch.stack(logits)
        return stacked.softmax(0), stacked.logsumexp(0)

    def fill(node: reference.Node, mass: torch.Tensor) -> None:
        if node.row is not None:
            matrix[node.row, node.row] = mass
        for place, one in enumerate(node.children):
            shares, _ = family(node, place)
            for other, share in zip(node.children[:place], shares[1:], strict=True):
                for i in one.rows():
                    matrix[i, other.rows()] = mass * share / len(other.rows())
            fill(one, mass * shares[0])

    fill(root, query.new_ones(()))
    return matrix


def test_hiding_later_siblings_alone_lets_later_queries_into_earlier_rows() -> None:
    """Rows 2 and 3 share a block: their weights on rows 0 and 1 come from their mean query.

    No later key is seen, the matrix is lower triangular, and still row 2 changes with row 3.
    That is why causal attention is refused with tie="blocks".
    """
    root = reference.from_lists([[0, 1], [2, 3]])
    generator = torch.manual_seed(0)
    query = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    key = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    before = masked_siblings(query, key, root)
    assert (before.triu(1) == 0).all()
    torch.testing.assert_close(before.sum(-1), torch.ones(4, dtype=torch.float64))
    query[3] = -query[3]
    after = masked_siblings(query, key, root)
    assert (after[2] - before[2]).abs().max() > 1e-2

    tree = SignalTree.from_parents([-1, 0, 0, 1, 1, 2, 2])
    with pytest.raises(ValueError, match="later token would change earlier rows"):
        hsa_attention(query[None], key[None], key[None], tree, causal=True)


def test_causal_blocks_are_refused_and_the_error_says_what_to_pass() -> None:
    tree = SignalTree.from_windows(4, (2,))
    query = torch.randn(1, 1, 4, 2)
    with pytest.raises(ValueError, match='causal=True needs tie="columns"'):
        hsa_attention(query, query, query, tree, causal=True)


def test_causal_attention_wants_rows_from_left_to_right() -> None:
    tree = SignalTree.from_parents([-1, 0, 0], rows=[-1, 1, 0])
    query = torch.randn(1, 1, 2, 2)
    with pytest.raises(ValueError, match="increasing order"):
        hsa_attention(query, query, query, tree, tie="columns", causal=True)
