import pytest
import torch

from polyscale.layers.hsa_positions import DomainPositions, laplacian_positions
from polyscale.trees import SignalTree


def places(width=16, **options):
    return DomainPositions(width, **options).double()


def largest(x):
    return x.detach().abs().max().item()


def test_in_a_sequence_only_the_distance_counts():
    embedded = places()(SignalTree.from_windows(50))[1:]
    scores = embedded @ embedded.T
    for distance in (0, 1, 7, 30):
        along = scores.diagonal(distance)
        assert largest(along - along[0]) < 1e-12
    assert largest(scores.diagonal() - 1) < 1e-12
    assert scores[0, 1] > scores[0, 10]
    assert scores[0, 1] < 0.999


def test_in_a_grid_only_the_offset_counts_and_both_ways_do():
    tree = SignalTree.from_image(6, 6, layout="flat")
    embedded = places()(tree)[tree.row_node].view(6, 6, 16)

    def score(a, b):
        return (embedded[a] @ embedded[b]).item()

    assert score((0, 0), (2, 1)) == pytest.approx(score((3, 2), (5, 3)), abs=1e-12)
    assert score((3, 3), (3, 3)) == pytest.approx(1, abs=1e-12)
    offsets = [score((2, 2), to) for to in ((2, 3), (3, 2), (3, 3), (3, 1))]
    assert all(abs(a - b) > 1e-3 for n, a in enumerate(offsets) for b in offsets[:n])


def test_roots_and_members_of_sets_get_zeros():
    tree = SignalTree.batch(
        [SignalTree.from_parents([-1, 0, 0], domains="set"), SignalTree.from_windows(3)]
    )
    embedded = places()(tree)
    assert (embedded[:2] == 0).all()
    members = tree.domain[tree.parent[2:]] == SignalTree.DOMAINS.index("set")
    assert members.sum() == 2
    assert (embedded[2:][members] == 0).all()
    assert (embedded[2:][~members].abs().amax(-1) > 0).all()


def test_a_key_has_the_embedding_of_its_name_whatever_number_a_tree_gives_it():
    one = SignalTree.from_records({"title": 1, "body": 2})
    other = SignalTree.from_records({"body": 2, "title": 1})
    layer = places(key_names=("body", "date", "title"))
    for tree in (one, other, SignalTree.batch([one, other])):
        embedded = layer(tree)
        for node, key in enumerate(tree.key.tolist()):
            if key >= 0:
                number = layer.key_names.index(tree.key_names[key])
                assert torch.equal(embedded[node], layer.keys.weight[number])
    layer(one).sum().backward()
    assert (layer.keys.weight.grad.abs().amax(-1) > 0).tolist() == [True, False, True]


def test_members_of_a_graph_get_what_the_caller_passes():
    tree = SignalTree.from_parents(
        [-1, 0, 0, 1, 1], domains=["graph", "sequence", None, None, None]
    )
    given = torch.randn(5, 16, dtype=torch.float64)
    embedded = places()(tree, given)
    assert torch.equal(embedded[1:3], given[1:3])
    assert (embedded[0] == 0).all()
    assert (embedded[3:] != given[3:]).all()
    for bad, got in ((None, "None"), (given[:, :8], r"\[5, 8\]"), (given[1:], r"\[4, 16\]")):
        with pytest.raises(ValueError, match=rf"graph_positions must be given .* got {got}"):
            places()(tree, bad)


def test_the_frequencies_follow_from_the_seed_and_are_saved():
    first, again, other = places(), places(), places(seed=1)
    assert torch.equal(first.frequencies, again.frequencies)
    assert not torch.equal(first.frequencies, other.frequencies)
    assert "frequencies" in first.state_dict()
    assert not first.frequencies.requires_grad


def test_bad_widths_and_unknown_keys_are_refused_by_name():
    for width, expected in ((0, "an integer of at least 2"), (-2, "an integer"), (7, "even")):
        with pytest.raises(ValueError, match=f"width must be {expected}.*, got {width}"):
            DomainPositions(width)
    tree = SignalTree.from_records({"title": 1, "body": 2})
    with pytest.raises(ValueError, match=r"key_names .* \['body'\] not in \['title'\]"):
        places(key_names=("title",))(tree)


def test_laplacian_positions_are_eigenvectors_in_order():
    path = torch.diag(torch.ones(5, dtype=torch.float64), 1)
    path = path + path.T
    found = laplacian_positions(path, 4)
    degree = path.sum(-1)
    laplacian = torch.eye(6) - path / (degree[:, None] * degree).sqrt()
    values = (found * (laplacian @ found)).sum(0)
    assert largest(found.T @ found - torch.eye(4)) < 1e-12
    assert largest(laplacian @ found - found * values) < 1e-12
    assert (values.diff() > 0).all()
    assert values[0] > 1e-3  # the constant one, of eigenvalue 0, says nothing
    along = found[:, 0] / degree.sqrt()
    assert (along.diff() > 0).all() or (along.diff() < 0).all()


def test_laplacian_positions_of_small_and_broken_graphs_are_finite():
    assert (laplacian_positions(torch.zeros(3, 3), 8)[:, 2:] == 0).all()
    assert laplacian_positions(torch.zeros(3, 3), 8).isfinite().all()
    assert laplacian_positions(torch.zeros(1, 1), 4).tolist() == [[0.0] * 4]
    with pytest.raises(ValueError, match=r"adjacency must be square, got shape \[2, 3\]"):
        laplacian_positions(torch.zeros(2, 3), 4)
