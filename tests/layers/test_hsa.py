import math

import pytest
import torch
import torch.nn.functional as F

import polyscale.layers.hsa
from polyscale.layers.hsa import HSAAttention, HTELayer
from polyscale.layers.hsa_positions import DomainPositions
from polyscale.ops.hsa import hsa_attention, hsa_energy
from polyscale.trees import SignalTree

NESTED = [[0, 1, 2], [3, 4], 5, [[6, 7], [8, 9]]]
TIES = ("blocks", "columns")


def tree_of(nested=NESTED):
    return SignalTree.from_nested(nested)


def record(words=3):
    """A keyed record of a sequence, a grid, a set and a graph, in two modalities."""
    graph = SignalTree.from_parents([-1, 0, 0, 0], domains="graph")
    tags = SignalTree.from_parents([-1, 0, 0], domains="set")
    fields = {"title": words, "photo": SignalTree.from_image(2, 2), "tags": tags, "links": graph}
    names = {"title": "text", "photo": "image", "tags": "text", "links": "image"}
    return SignalTree.from_records(fields, modalities=names)


def layer_of(cls=HSAAttention, width=12, heads=2, **options):
    layer = cls(width, heads, **options).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def leaves(tree, width=12, *lead):
    return torch.randn(*lead, tree.num_rows, width, dtype=torch.float64)


def embed(tree, width=6):
    """Node embeddings that are not zero anywhere but in sets and at roots."""
    places = DomainPositions(width, tree.key_names).double()
    return places(tree, torch.randn(tree.num_nodes, width).double()).detach()


def largest(x):
    return x.detach().abs().max().item()


@pytest.fixture
def seen(monkeypatch):
    """What layers pass to the attention, newest last."""
    calls = []

    def spy(query, key, value, tree, **options):
        calls.append({"query": query, "key": key, "value": value, **options})
        return hsa_attention(query, key, value, tree, **options)

    monkeypatch.setattr(polyscale.layers.hsa, "hsa_attention", spy)
    return calls


def by_hand(layer, x, tree, **options):
    """Attention of one modality with the layer's weights, a head at a time."""
    query, key, value = layer.qkv_proj[0](x).chunk(3, -1)  # [N, d_model]
    width = layer.head_dim
    heads = []
    for head in range(layer.num_heads):
        at = slice(head * width, (head + 1) * width)
        q, k = (F.layer_norm(part[:, at], (width,)) for part in (query, key))
        heads.append((q, hsa_attention(q[None], k[None], value[None, :, at], tree, **options)[0]))
    return heads


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("include_self", [True, False])
def test_one_modality_is_projection_norm_attention_and_projection(tie, include_self):
    tree = tree_of()
    layer, x = layer_of(tie=tie, include_self=include_self), leaves(tree)
    heads = by_hand(layer, x, tree, tie=tie, include_self=include_self)
    expected = layer.out_proj(torch.cat([attended for _, attended in heads], -1))
    assert largest(layer(x, tree) - expected) < 1e-12


def test_the_query_residual_adds_the_normalised_queries():
    tree = tree_of()
    layer, x = layer_of(query_residual=True), leaves(tree)
    heads = by_hand(layer, x, tree)
    expected = layer.out_proj(torch.cat([query + attended for query, attended in heads], -1))
    assert largest(layer(x, tree) - expected) < 1e-12


@pytest.mark.parametrize("query_residual", [True, False])
def test_without_attention_a_row_depends_on_itself_alone(query_residual):
    tree = tree_of()
    layer, x = layer_of(attention="none", query_residual=query_residual), leaves(tree)
    queries = torch.cat([query for query, _ in by_hand(layer, x, tree)], -1)
    output = layer(x, tree)
    assert largest(output - layer.out_proj(queries)) < 1e-12
    assert largest(output[:4] - layer(x[:4], tree_of([0, 1, 2, 3]))) < 1e-12


def test_equal_projections_of_two_modalities_are_one_modality():
    tree = record()
    plain = layer_of()
    double = layer_of(modalities=("text", "image"))
    double.out_proj.load_state_dict(plain.out_proj.state_dict())
    for projection in double.qkv_proj:
        projection.load_state_dict(plain.qkv_proj[0].state_dict())
    x = leaves(tree)
    assert largest(double(x, tree) - plain(x, tree.with_modality("default"))) < 1e-12


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("changed", [0, 1])
def test_the_projection_of_a_modality_is_used_for_its_rows_alone(seen, lead, changed):
    tree = record()
    layer, x = layer_of(modalities=("image", "text")), leaves(tree, 12, *lead)
    layer(x, tree)
    with torch.no_grad():
        layer.qkv_proj[changed].weight += torch.randn(36, 12)
    layer(x, tree)
    names = [tree.modality_names[m] for m in tree.modality[tree.row_node].tolist()]
    own = torch.tensor([name == layer.modalities[changed] for name in names])
    assert own.any()
    assert not own.all()
    before, after = seen
    for part in ("query", "key", "value"):
        moved = (before[part] - after[part]).abs().amax(-1)  # [..., H, N]
        assert moved[..., own].min() > 1e-6
        assert moved[..., ~own].max() == 0


def test_the_order_in_which_a_tree_numbers_its_modalities_does_not_matter():
    tree = record()
    layer, x = layer_of(modalities=("text", "image")), leaves(tree)
    other = SignalTree.batch([SignalTree.from_windows(1, modality="image"), tree])
    assert other.modality_names != tree.modality_names
    expected = layer(x, tree)
    assert largest(layer(torch.cat([x[:1], x]), other)[1:] - expected) < 1e-12


@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"alpha": 1.5}, {"tie": "columns"}])
def test_packed_trees_are_the_batch_of_one_tree(options):
    tree = record()
    layer = layer_of(modalities=("text", "image"), position_width=6, **options)
    x, positions = leaves(tree, 12, 3), embed(tree)
    together = layer(x, tree, positions=positions)
    forest = SignalTree.batch([tree] * 3)
    order = torch.argsort(torch.cat([tree.depth] * 3), stable=True)
    of_forest = torch.cat([positions] * 3)[order]
    packed = layer(x.flatten(0, 1), forest, positions=of_forest)
    assert largest(packed.view_as(together) - together) < 1e-12
    assert largest(layer(x, forest, positions=of_forest) - together) < 1e-12


@pytest.mark.parametrize("tie", TIES)
def test_masked_rows_are_rows_pruned_from_the_tree(tie):
    tree = record()
    layer = layer_of(HTELayer, tie=tie, modalities=("text", "image"), position_width=6)
    places = DomainPositions(6, tree.key_names).double()
    graph = torch.randn(tree.num_nodes, 6).double()
    x = leaves(tree)
    mask = torch.zeros(tree.num_rows, dtype=torch.bool)
    mask[[1, 2, 7, 11]] = True
    pruned = tree.prune(~mask)
    # The nodes that stay, found by their leaves: a node stays if one of its leaves does.
    rows = tree.leaf_row[tree.leaf_order]
    stays = torch.tensor(
        [
            bool((~mask)[rows[begin : begin + count]].any())
            for begin, count in zip(tree.leaf_begin, tree.leaf_count, strict=True)
        ]
    )
    masked = layer(x, tree, mask, places(tree, graph))
    without = layer(x, pruned, None, places(pruned, graph[stays]))
    assert largest((masked - without)[~mask]) < 1e-12
    junk = layer(torch.where(mask[:, None], 1e3, x), tree, mask, places(tree, graph))
    assert largest((masked - junk)[~mask]) == 0


@pytest.mark.parametrize("tie", TIES)
def test_rotation_counts_the_leaves_that_a_mask_leaves(tie):
    tree = SignalTree.batch([SignalTree.from_windows(n, (3, 2)) for n in (11, 1, 6)])
    layer = layer_of(HSAAttention, tie=tie, rotary=True)
    x = torch.randn(18, layer.d_model, dtype=torch.float64)
    mask = torch.zeros(18, dtype=torch.bool)
    mask[[0, 4, 5, 13]] = True
    masked, pruned = layer(x, tree, mask), layer(x, tree.prune(~mask))
    assert largest((masked - pruned)[~mask]) < 1e-12


def domain_tree(domain):
    return SignalTree.from_parents([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3], domains=domain)


# Rows are 0 1 2 | 3 4 5 | 6: swap two leaves of a family, and two whole families.
WITHIN, FAMILIES = [1, 0, 2, 3, 4, 5, 6], [3, 4, 5, 0, 1, 2, 6]


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("order", [WITHIN, FAMILIES], ids=["leaves", "families"])
def test_permuting_the_members_of_a_set_permutes_the_output_and_nothing_else(tie, order):
    tree = domain_tree("set")
    layer, x = layer_of(HTELayer, tie=tie, position_width=6), leaves(tree)
    positions = embed(tree)
    assert (
        largest(layer(x[order], tree, None, positions) - layer(x, tree, None, positions)[order])
        < 1e-12
    )


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("order", [WITHIN, FAMILIES], ids=["leaves", "families"])
def test_the_members_of_a_sequence_have_an_order(tie, order):
    tree = domain_tree("sequence")
    layer, x = layer_of(HTELayer, tie=tie, position_width=6), leaves(tree)
    positions = embed(tree)
    moved = layer(x[order], tree, None, positions) - layer(x, tree, None, positions)[order]
    assert largest(moved) > 1e-4
    without = layer_of(HTELayer, tie=tie)
    assert largest(without(x[order], tree) - without(x, tree)[order]) < 1e-12


def paper_energy(tree, query, key, places, include_self):
    """The energy of every node as the paper writes it, with squared distances."""
    width = query.shape[-1]
    rows = tree.leaf_row[tree.leaf_order]

    def under(node):
        begin = tree.leaf_begin[node]
        return rows[begin : begin + tree.leaf_count[node]]

    def psi(one, other):
        distance = torch.cdist(query[under(one)], key[under(other)]) ** 2
        return distance.mean() / (2 * math.sqrt(width)) - places[one] @ places[other]

    phi = {}
    for node in reversed(range(tree.num_nodes)):
        first, count = int(tree.first_child[node]), int(tree.child_count[node])
        family = range(first, first + count)
        if not count:
            row = tree.leaf_row[node]
            own = ((query[row] - key[row]) ** 2).sum() / (2 * math.sqrt(width))
            phi[node] = own if include_self else torch.tensor(torch.inf).double()
            continue
        phi[node] = torch.zeros(()).double()
        for one in family:
            others = [tree.leaf_count[c] * (-psi(one, c)).exp() for c in family if c != one]
            share = int(tree.leaf_count[one]) / int(tree.leaf_count[node])
            phi[node] = phi[node] - share * ((-phi[one]).exp() + sum(others)).log()
    return phi


@pytest.mark.parametrize("include_self", [True, False])
def test_the_energy_is_the_papers_distance_form_less_the_root_of_the_width(seen, include_self):
    tree = tree_of()
    layer = layer_of(position_width=6, include_self=include_self)
    # So far above the norm's eps that all queries and keys have the length sqrt(width) exactly.
    layer(1e6 * leaves(tree), tree, positions=embed(tree))
    (call,) = seen
    places = call["position_scores"]
    phi = hsa_energy(
        call["query"],
        call["key"],
        tree,
        include_self=include_self,
        position_scores=places,
        certificate=False,
    ).phi
    inner = [node for node in range(tree.num_nodes) if tree.child_count[node]]
    for head in range(2):
        paper = paper_energy(
            tree, call["query"][head], call["key"][head], places[head], include_self
        )
        for node in inner:
            assert abs(paper[node] - phi[head, node] - math.sqrt(layer.head_dim)) < 1e-12


def test_without_normalize_queries_and_keys_are_as_projected(seen):
    tree = tree_of()
    layer, x = layer_of(normalize=False), leaves(tree)
    layer(x, tree)
    query, key, _ = layer.qkv_proj[0](x).chunk(3, -1)
    for part, name in ((query, "query"), (key, "key")):
        expected = part.unflatten(-1, (2, 6)).transpose(0, 1)
        assert largest(seen[0][name] - expected) == 0


@pytest.mark.parametrize("tie", TIES)
def test_gradients_reach_every_parameter(tie):
    tree = record()
    layer = layer_of(
        HTELayer, tie=tie, modalities=("text", "image"), position_width=6, alpha="learned"
    )
    x = leaves(tree).requires_grad_()
    output = layer(x, tree, None, embed(tree))
    (output * torch.randn_like(output)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        # Members of a set have position 0, whatever its projection.
        assert (largest(parameter.grad) > 0) == ("position_proj.set" not in name), name
    assert x.grad.abs().amax(-1).min() > 0


def test_learned_alphas_have_a_gradient_for_every_depth_of_the_tree():
    tree = tree_of()
    layer, x = layer_of(alpha="learned"), leaves(tree)
    output = layer(x, tree)
    (output * torch.randn_like(output)).sum().backward()
    gradient = layer.alpha_logits.grad
    assert (gradient[: tree.max_depth] != 0).all()
    assert (gradient[tree.max_depth :] == 0).all()


def test_learned_alphas_start_at_one_and_a_half_and_serve_any_depth():
    tree = SignalTree.from_parents([-1, *(n // 2 * 2 for n in range(80))])  # 40 levels of two
    assert tree.max_depth > polyscale.layers.hsa.MAX_DEPTH
    learned, fixed = HSAAttention(12, 2, alpha="learned"), HSAAttention(12, 2, alpha=1.5)
    fixed.load_state_dict(learned.state_dict(), strict=False)
    x = torch.randn(tree.num_rows, 12)
    assert largest(learned(x, tree) - fixed(x, tree)) < 1e-6


def test_an_hte_layer_is_attention_norm_and_mlp_with_a_residual():
    tree = tree_of()
    layer, x = layer_of(HTELayer, intermediate_size=20), leaves(tree)
    assert layer.attention.query_residual
    assert layer.mlp[0].out_features == 20
    normed = layer.norm(layer.attention(x, tree))
    assert largest(layer(x, tree) - normed - layer.mlp(normed)) < 1e-12


def test_dropout_acts_in_training_alone():
    tree = tree_of()
    layer, x = layer_of(HTELayer, dropout=0.5), leaves(tree)
    assert torch.equal(layer(x, tree), layer(x, tree))
    layer.train()
    assert not torch.equal(layer(x, tree), layer(x, tree))


def test_a_single_leaf_that_may_not_see_itself_keeps_its_query():
    tree = SignalTree.from_windows(1)
    layer = layer_of(HTELayer, include_self=False, position_width=6)
    assert layer(leaves(tree), tree, None, embed(tree)).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 10, "num_heads": 3}, "d_model must be a multiple of num_heads, got 10 and 3"),
        ({"num_heads": 0}, "num_heads"),
        ({"attention": "soft"}, "attention must be one of .* got 'soft'"),
        ({"tie": "rows"}, "tie must be one of 'blocks', 'columns', got 'rows'"),
        ({"causal": True}, "tie must be 'columns' with causal=True, got 'blocks'"),
        ({"modalities": ()}, "modalities must name at least one"),
        ({"alpha": "free"}, "alpha must be one of 'learned', got 'free'; or pass a number"),
        ({"alpha": 0.5}, "alpha must be a finite number of at least 1, got 0.5; or pass 'learned'"),
        ({"modalities": ("text", "text")}, "modalities must differ"),
        ({"position_width": -2}, "position_width must be an integer of at least 0, got -2"),
        ({"d_model": 6, "num_heads": 2, "rotary": True}, "must be even with rotary=True, got 3"),
    ],
)
@pytest.mark.parametrize("cls", [HSAAttention, HTELayer])
def test_bad_options_are_refused_by_name(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**{"d_model": 12, "num_heads": 2, **options})


def test_bad_arguments_are_refused_by_name():
    tree = tree_of()
    layer, x = layer_of(), leaves(tree)
    with pytest.raises(TypeError, match=r"x must be a floating tensor, got torch.int64"):
        layer(x.long(), tree)
    with pytest.raises(TypeError, match="x must be a floating tensor, got list"):
        layer(x.tolist(), tree)
    with pytest.raises(ValueError, match=r"x must have shape .* got \(10, 11\)"):
        layer(x[:, 1:], tree)
    with pytest.raises(TypeError, match=r"tree must be a SignalTree, got \(8, 8\); windows"):
        layer(torch.randn(1, 64, 12), (8, 8))
    with pytest.raises(ValueError, match="tree must be given"):
        layer(x)
    with pytest.raises(ValueError, match=r"9 rows .* 10"):
        layer(x[1:], tree)
    with pytest.raises(TypeError, match=r"key_padding_mask must .*got torch.int64"):
        layer(x, tree, torch.zeros(10, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"key_padding_mask must .*got \[9\]"):
        layer(x, tree, torch.zeros(9, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"positions must be None .* position_width=0"):
        layer(x, tree, positions=embed(tree))
    with pytest.raises(ValueError, match=r"alpha.* got 0.5"):
        layer_of(alpha=0.5)(x, tree)
    with pytest.raises(ValueError, match=r"impl must .*got 'fast'"):
        layer_of(impl="fast")(x, tree)


def test_positions_and_modalities_that_do_not_fit_are_refused_by_name():
    tree = tree_of()
    layer, x = layer_of(position_width=6), leaves(tree)
    with pytest.raises(ValueError, match=r"positions must be \[M, width\] with M = 16, got None"):
        layer(x, tree)
    with pytest.raises(ValueError, match=r"positions must be .* got \[15, 6\]"):
        layer(x, tree, positions=embed(tree)[1:])
    layer = layer_of(modalities=("text", "image"))
    with pytest.raises(ValueError, match=r"modalities .* \['sound'\] not in \['text', 'image'\]"):
        layer(x, tree.with_modality("sound"))
