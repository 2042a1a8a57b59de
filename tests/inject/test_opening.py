from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polyscale.inject import inject_hsa, injected_settings, load_injected, save_injected
from polyscale.inject.opening import opened_attention
from polyscale.ops.hsa import hsa_attention, hsa_energy, hsa_matrix
from polyscale.trees import SignalTree
from tests.inject.models import bert, llama, logits, text

TREES = {
    "windows": SignalTree.from_windows(21, (2, 3)),
    "uneven": SignalTree.from_nested(
        [
            0,
            [1, [2, 3, 4], 5],
            [[6, 7], [8, [9, 10]]],
            11,
            [[12, 13, 14, 15], [16, 17]],
            [18, 19, 20],
        ]
    ),
    "flat": SignalTree.from_windows(21),
}


def parts(batch: int = 2) -> list[Tensor]:
    return [torch.randn(batch, 3, 21, 4, dtype=torch.float64) for _ in range(3)]


def naive(
    query: Tensor, key: Tensor, tree: SignalTree, opened: int, causal: bool, kept: list[int]
) -> Tensor:
    """The weights [N, N] of one head, from the definition, node by node."""
    rows = tree.num_rows
    leaves = {
        node: [
            int(tree.leaf_row[leaf])
            for leaf in tree.leaf_order[
                tree.leaf_begin[node] : tree.leaf_begin[node] + tree.leaf_count[node]
            ]
            if int(tree.leaf_row[leaf]) in kept
        ]
        for node in range(tree.num_nodes)
    }

    def children(node: int) -> list[int]:
        first, size = int(tree.first_child[node]), int(tree.child_count[node])
        return list(range(first, first + size))

    def logit(row: int, node: int) -> float:
        score = torch.stack([query[row] @ key[other] for other in leaves[node]]).mean()
        return float(score) + math.log(len(leaves[node]))

    weights = torch.zeros(rows, rows, dtype=torch.float64)
    for row in kept:
        node = int(tree.row_node[row])
        seen = [node]
        while int(tree.parent[node]) >= 0:
            parent = int(tree.parent[node])
            seen += [
                other
                for other in children(parent)
                if other != node and leaves[other] and (not causal or other < node)
            ]
            node = parent
        inner = [other for other in seen if int(tree.child_count[other]) > 1]
        for other in sorted(inner, key=lambda one: logit(row, one), reverse=True)[:opened]:
            seen.remove(other)
            seen += [child for child in children(other) if leaves[child]]
        total = torch.tensor([logit(row, other) for other in seen], dtype=torch.float64).logsumexp(
            0
        )
        for other in seen:
            mass = (torch.tensor(logit(row, other), dtype=torch.float64) - total).exp()
            for leaf in leaves[other]:
                weights[row, leaf] = mass / len(leaves[other])
    return weights


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("opened", [0, 1, 3])
@pytest.mark.parametrize("name", TREES)
def test_opened_attention_is_its_definition(name: str, opened: int, causal: bool) -> None:
    tree = TREES[name]
    query, key, value = parts()
    hidden = torch.zeros(2, 21, dtype=torch.bool)
    hidden[1, [4, 6, 7, 18, 20]] = True
    found, _ = opened_attention(
        query, key, value, tree, opened, causal=causal, key_padding_mask=hidden, scale=1.0
    )
    for at in range(2):
        kept = (~hidden[at]).nonzero().flatten().tolist()
        for head in range(3):
            weights = naive(query[at, head], key[at, head], tree, opened, causal, kept)
            expected = weights @ value[at, head]
            torch.testing.assert_close(found[at, head], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", TREES)
def test_opening_nothing_is_hsa_and_its_sums_are_the_certificate(name: str) -> None:
    tree = TREES[name]
    query, key, value = parts()
    options = {"causal": False, "key_padding_mask": None, "scale": 0.5}
    found, sums = opened_attention(query, key, value, tree, 0, **options)
    expected = hsa_attention(query, key, value, tree, tie="columns", scale=0.5)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    energy = hsa_energy(query, key, tree, tie="columns", scale=0.5)
    kl = (energy.log_partition - sums).sum(-1)
    torch.testing.assert_close(kl, energy.kl[..., 0], atol=1e-9, rtol=1e-9)


def test_each_opened_node_brings_the_attention_closer_to_softmax() -> None:
    query, key, value = parts()
    tree = SignalTree.from_windows(21, (3,))
    totals = []
    for opened in range(7):
        _, sums = opened_attention(
            query, key, value, tree, opened, causal=False, key_padding_mask=None, scale=1.0
        )
        totals.append(float(sums.sum()))
    assert totals == sorted(totals)
    assert totals[0] < totals[1] < totals[2]
    flat = (query @ key.mT).logsumexp(-1).sum()
    assert totals[-1] == pytest.approx(float(flat))  # all windows open: softmax itself


def test_gradients_are_those_of_the_chosen_nodes() -> None:
    tree = SignalTree.from_windows(8, (2, 2))
    given = [part[:1, :1, :8].clone().requires_grad_() for part in parts()]

    def run(*each: Tensor) -> Tensor:
        options = {"causal": True, "key_padding_mask": None, "scale": 1.0}
        return opened_attention(*each, tree, 2, **options)[0]

    assert torch.autograd.gradcheck(run, given)


def test_injected_models_open_blocks() -> None:
    ids = text()
    plain = bert()
    original = logits(plain, input_ids=ids)
    changes = []
    for opened in (0, 1, 2, 20):
        model = bert()
        model.load_state_dict(plain.state_dict())
        inject_hsa(model, hierarchy=(3,), open_blocks=opened)
        changes.append(float((logits(model, input_ids=ids) - original).abs().mean()))
    assert changes[0] > changes[1] > changes[2] > changes[3]
    assert changes[3] < 1e-9


def test_opening_blocks_works_with_padding_sentences_causality_and_weights() -> None:
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1, :8] = 0
    given = {"input_ids": text(), "attention_mask": mask}
    given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    for model in (
        inject_hsa(bert(), hierarchy="sentences", sentence_ends=range(5, 15), open_blocks=1),
        inject_hsa(llama(), hierarchy=(2, 2), open_blocks=2),
    ):
        found = logits(model, **given, use_cache=False)[1, 8:]
        alone = logits(model, input_ids=text()[1:, 8:], use_cache=False)[0]
        torch.testing.assert_close(found, alone, atol=1e-9, rtol=1e-9)
        weights = model(**given, use_cache=False, output_attentions=True).attentions
        sums = weights[0].sum(-1)
        torch.testing.assert_close(sums, mask[:, None].expand_as(sums).to(sums.dtype))


def test_weights_of_no_opened_blocks_are_those_of_hsa_matrix() -> None:
    query, key, _ = parts()
    tree = TREES["uneven"]
    identity = torch.eye(21, dtype=torch.float64).expand(2, 3, 21, 21)
    found, _ = opened_attention(
        query, key, identity, tree, 0, causal=True, key_padding_mask=None, scale=1.0
    )
    expected = hsa_matrix(query, key, tree, tie="columns", causal=True, scale=1.0)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_opening_blocks_is_refused_where_it_has_no_meaning(tmp_path: object) -> None:
    with pytest.raises(ValueError, match=r'open_blocks: got 2 with tie="blocks"'):
        inject_hsa(bert(), tie="blocks", open_blocks=2)
    with pytest.raises(ValueError, match="open_blocks: got -1"):
        inject_hsa(bert(), open_blocks=-1)
    model = inject_hsa(llama(), open_blocks=2)
    with pytest.raises(ValueError, match="open_blocks goes without it"):
        model(text(), use_cache=True)
    save_injected(model, tmp_path)  # type: ignore[arg-type]
    again = load_injected(tmp_path)  # type: ignore[arg-type]
    assert injected_settings(again)[0].open_blocks == 2
