"""The analysis of HSA: models, layers, and queries and keys at hand."""

import pytest
import torch

import polyscale as ps
from polyscale.analysis import analyze_hsa
from polyscale.layers.hsa import HSAAttention
from polyscale.ops.hsa import hsa_energy
from polyscale.theory import flat_scores, open_family
from polyscale.trees import SignalTree
from tests.analysis.properties import assert_sound
from tests.ops.hsa.helpers import KINDS, bushy_tree, kind_name, random_inputs
from tests.theory.helpers import draw, randomise


def kl_totals(found):
    return [entry["kl_total"] for entry in found["hsa"]["layers"]]


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_queries_and_keys_give_the_certificate_family_by_family(kind):
    tree = bushy_tree()
    inputs = random_inputs(tree, 0, strength=1.5)
    query, key = inputs.query.detach(), inputs.key.detach()
    found = analyze_hsa((query, key), tree=tree, tokens=list("abcdefghij"), **kind)
    assert_sound(found)
    energy = hsa_energy(query, key, tree, **kind)
    assert kl_totals(found) == pytest.approx(energy.kl[:, 0].tolist(), rel=1e-5)
    for head, entry in enumerate(found["hsa"]["layers"]):
        assert sum(one["kl"] for one in entry["families"]) == pytest.approx(
            entry["kl_total"], rel=1e-4
        )
        losses = [one["kl"] for one in entry["families"]]
        assert losses == sorted(losses, reverse=True)
        for one in entry["families"]:
            phi = energy.phi[head, one["node"]].item()
            expected = None if phi == float("inf") else pytest.approx(phi, rel=1e-5)
            assert one["energy"] == expected
            assert one["leaves"] == int(tree.leaf_count[one["node"]])
        for finer in entry["finer"]:
            opened = hsa_energy(query, key, open_family(tree, finer["node"]), **kind)
            assert finer["kl_after"] == pytest.approx(opened.kl[head, 0].item(), rel=1e-5, abs=1e-9)
    shown = found["hsa"]["tree"]
    assert shown["parent"] == tree.parent.tolist()
    assert shown["leaf_tokens"] == list("abcdefghij")
    assert [shown["label"][node] for node in shown["leaf_nodes"]] == shown["leaf_tokens"]


def test_rows_outside_the_tree_have_no_part():
    query, key = draw(2, 2, 6, 4)
    tree = SignalTree.from_windows(6, (2,)).prune(torch.tensor([1, 1, 0, 1, 1, 0]).bool())
    found = analyze_hsa((query, key), tree=tree, tokens=list("abcdef"))
    assert found["meta"]["length"] == 4
    assert found["meta"]["tokens"] == ["a", "b", "d", "e"]
    assert kl_totals(found) == pytest.approx(
        hsa_energy(query, key, tree).kl[:, 0].tolist(), rel=1e-5
    )


def causal_model(**options):
    config = ps.HSAConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, windows=(2, 3), **options
    )
    return randomise(ps.HSAForCausalLM(config), 0.3)


@pytest.mark.parametrize("positions", ["rotary", "learned", "none"])
@pytest.mark.parametrize("length", [1, 2, 13, 40])
def test_causal_models(positions, length):
    model = causal_model(positions=positions)
    found = analyze_hsa(model, {"input_ids": torch.randint(3, 259, (2, length))}, example=1)
    assert_sound(found)
    assert (found["meta"]["layers"], found["meta"]["heads"]) == (2, 2)
    assert found["meta"]["length"] == length
    assert len(found["attention"]) == 4
    for one in found["attention"]:
        matrix = torch.tensor(one["map"])
        assert matrix.triu(1).abs().max() == 0
        assert matrix.sum(-1).tolist() == pytest.approx([1] * length, abs=2e-3)


def test_the_analysis_is_of_what_the_model_attends_with(monkeypatch):
    import polyscale.layers.hsa as layers

    calls = []

    def watch(query, key, value, tree, **options):
        calls.append((query.detach(), key.detach(), tree, options))
        return attend(query, key, value, tree, **options)

    attend = layers.hsa_attention
    monkeypatch.setattr(layers, "hsa_attention", watch)
    batch = {"input_ids": torch.randint(3, 259, (1, 20))}
    found = analyze_hsa(causal_model(), batch)
    totals = []
    for query, key, tree, options in calls:
        kept = {name: options[name] for name in ("tie", "causal", "include_self")}
        totals += hsa_energy(query.double(), key.double(), tree, **kept).kl[0, :, 0].tolist()
    assert kl_totals(found) == pytest.approx(totals, rel=1e-3)


@pytest.mark.parametrize("boundaries", [None, [[40], [50]]])
def test_padding_on_any_side_changes_nothing(boundaries):
    model = causal_model(boundary_token_ids=boundaries)
    ids = torch.randint(3, 60, (1, 14))
    ids[0, 5], ids[0, 9] = 40, 50
    plain = analyze_hsa(model, {"input_ids": ids})
    for left, right in ((3, 0), (0, 4), (2, 2)):
        padded = torch.nn.functional.pad(ids, (left, right))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
        names = ["-"] * left + [str(n) for n in range(14)] + ["-"] * right
        found = analyze_hsa(model, {"input_ids": padded, "attention_mask": mask}, tokens=names)
        assert kl_totals(found) == pytest.approx(kl_totals(plain), rel=1e-3, abs=1e-5)
        assert found["hsa"]["tree"]["parent"] == plain["hsa"]["tree"]["parent"]
        assert found["meta"]["tokens"] == [str(n) for n in range(14)]


@pytest.mark.parametrize("tie", ["blocks", "columns"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("alpha", [1.0, 1.5, "learned"])
def test_encoders_over_forests(tie, include_self, alpha):
    config = ps.HTEConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie=tie,
        include_self=include_self,
        alpha=alpha,
        position_width=8,
    )
    model = randomise(ps.HTEForClassification(config), 0.3)
    forest = SignalTree.batch([SignalTree.from_windows(6, (3,)), bushy_tree()])
    batch = {"inputs": torch.randint(0, 259, (16,)), "tree": forest}
    found = analyze_hsa(model, batch, example=1)
    assert_sound(found)
    assert found["meta"]["length"] == 10
    assert found["hsa"]["tree"]["parent"] == bushy_tree().parent.tolist()
    assert bool(found["hsa"]["layers"][0]["finer"]) == (alpha == 1.0)
    assert any("Entmax" in note for note in found["meta"]["notes"]) == (alpha != 1.0)


def test_pooled_encoders_have_a_tree_per_layer_and_say_so():
    config = ps.HTEConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, local_pooling=True
    )
    model = randomise(ps.HTEModel(config), 0.3)
    tree = SignalTree.from_windows(12, (2, 3))
    found = analyze_hsa(model, {"inputs": torch.randint(0, 259, (12,)), "tree": tree})
    assert_sound(found)
    assert any("different trees" in note for note in found["meta"]["notes"])


def test_a_layer_with_a_mask_is_a_layer_over_the_pruned_tree():
    layer = randomise(HSAAttention(16, 2, position_width=4)).double()
    tree = bushy_tree()
    x, positions = draw(1, 10, 16), draw(tree.num_nodes, 4, seed=1)
    mask = torch.zeros(1, 10, dtype=torch.bool)
    # Nodes 2 and 11: all nodes after them get other numbers.
    mask[0, [0, 5]] = True
    found = analyze_hsa(
        layer, {"x": x, "tree": tree, "key_padding_mask": mask, "positions": positions}
    )
    with torch.no_grad():
        query, key, _ = layer._project(x, tree)
        embeddings = layer._position_scores(tree, positions)
    energy = hsa_energy(query, key, tree, key_padding_mask=mask, position_scores=embeddings)
    assert kl_totals(found) == pytest.approx(energy.kl[0, :, 0].tolist(), rel=1e-5)
    assert found["meta"]["length"] == 8


def test_a_single_leaf_loses_nothing():
    query = draw(1, 1, 4)
    found = analyze_hsa((query, query), tree=SignalTree.from_parents([-1]))
    assert kl_totals(found) == [0]
    assert found["hsa"]["layers"][0]["families"] == []
    assert_sound(found)


def test_only_the_worst_families_are_listed_and_the_rest_is_counted():
    query, key = draw(2, 1, 400, 4)
    found = analyze_hsa((query, key), tree=SignalTree.from_windows(400, (2, 2)), maps=False)
    entry = found["hsa"]["layers"][0]
    assert len(entry["families"]) == 64
    listed = sum(one["kl"] for one in entry["families"])
    assert listed + entry["kl_unlisted"] == pytest.approx(entry["kl_total"], rel=1e-4)
    assert any("64 families" in note for note in found["meta"]["notes"])
    assert found["attention"] == []


def test_bad_input_is_named():
    pair = draw(2, 1, 4, 4)
    query, key = pair
    tree = SignalTree.from_windows(4, (2,))
    with pytest.raises(TypeError, match="tree must be a SignalTree, got NoneType"):
        analyze_hsa((query, key))
    with pytest.raises(ValueError, match=r"pair \(query, key\) of tensors"):
        analyze_hsa((query[0], key[0]), tree=tree)
    with pytest.raises(ValueError, match="tree must be one tree, got 2"):
        analyze_hsa((query, key), tree=SignalTree.batch([SignalTree.from_windows(2)] * 2))
    with pytest.raises(ValueError, match="max_leaves: the tree has 4 leaves"):
        analyze_hsa((query, key), tree=tree, max_leaves=3)
    with pytest.raises(ValueError, match="tokens must name each of the 4 rows"):
        analyze_hsa((query, key), tree=tree, tokens=["a"])
    with pytest.raises(ValueError, match="model must have HSAAttention layers"):
        analyze_hsa(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="a model brings its own"):
        analyze_hsa(causal_model(), {"input_ids": torch.ones(1, 3).long()}, tree=tree)
    with pytest.raises(ValueError, match="example must be from 0 to 0, got 1"):
        analyze_hsa(causal_model(), {"input_ids": torch.ones(1, 3).long()}, example=1)
    with pytest.raises(ValueError, match="attention='none'"):
        analyze_hsa(HSAAttention(8, 2, attention="none"), (torch.zeros(1, 4, 8), tree))
    two = SignalTree.from_parents([-1, 0, 0], rows=[-1, 1, 0])
    with pytest.raises(ValueError, match="causal"):
        flat_scores(query[:, :2], key[:, :2], two, causal=True)
    with pytest.raises(ValueError, match="query and key must have the tree's 2 rows"):
        analyze_hsa((query, key), tree=SignalTree.from_windows(2))
