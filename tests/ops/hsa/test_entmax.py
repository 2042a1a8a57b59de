"""alpha-entmax families: the weighted solver, its gradients, and the recursion built on it."""

from typing import Any

import entmax as package
import pytest
import torch

from polyscale.ops.hsa import hsa_attention, hsa_energy, hsa_matrix, reference
from polyscale.ops.hsa.entmax import normalise_entmax
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import (
    KINDS,
    assert_paths_agree,
    bushy_tree,
    kind_name,
    random_inputs,
    random_tree,
    settings_of,
)

every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)


def scores_and_counts(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.manual_seed(seed)
    scores = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    return scores, torch.randint(1, 5, (6,), generator=generator).double()


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 2.0, 3.0])
def test_multiplicities_are_entries_written_down_several_times(alpha: float) -> None:
    scores, counts = scores_and_counts()
    mass, _ = normalise_entmax(scores, counts, torch.tensor(alpha, dtype=torch.float64))
    spread = package.entmax_bisect(
        scores.repeat_interleave(counts.long(), -1), alpha, dim=-1, n_iter=100
    )
    groups = spread.split(counts.long().tolist(), -1)
    expected = torch.stack([group.sum(-1) for group in groups], -1)
    torch.testing.assert_close(mass, expected, atol=1e-11, rtol=0)
    assert alpha < 1.5 or (mass == 0).any()


def test_known_cases_match_the_packages_exact_algorithms() -> None:
    scores, _ = scores_and_counts()
    one = torch.ones(6, dtype=torch.float64)
    for alpha, exact in ((1.5, package.entmax15), (2.0, package.sparsemax)):
        mass, _ = normalise_entmax(scores, one, torch.tensor(alpha, dtype=torch.float64))
        torch.testing.assert_close(mass, exact(scores, dim=-1), atol=1e-11, rtol=0)


def test_alpha_one_is_softmax_and_is_approached_continuously() -> None:
    scores, counts = scores_and_counts()
    logits = scores + counts.log()
    for alpha, tolerance in ((1.0, 1e-14), (1 + 1e-9, 1e-7), (1 + 1e-6, 1e-4)):
        mass, value = normalise_entmax(scores, counts, torch.tensor(alpha, dtype=torch.float64))
        torch.testing.assert_close(mass, logits.softmax(-1), atol=tolerance, rtol=0)
        torch.testing.assert_close(value, logits.logsumexp(-1), atol=tolerance, rtol=0)


@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-7, 1.01, 1.5, 1.9])
def test_gradients_are_those_of_finite_differences(alpha: float) -> None:
    scores, counts = scores_and_counts()
    scores = scores.requires_grad_()
    power = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    generator = torch.manual_seed(5)
    combine = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    blend = torch.randn(20, generator=generator, dtype=torch.float64)

    def total(s: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        mass, value = normalise_entmax(s, counts, a)
        return (mass * combine).sum() + (value * blend).sum()

    to_scores, to_alpha = torch.autograd.grad(total(scores, power), (scores, power))
    step = 1e-6
    with torch.no_grad():
        # Four points ahead of alpha, which cannot go below 1.
        ahead = [total(scores, power + n * step) for n in range(3)]
        slope = (-1.5 * ahead[0] + 2 * ahead[1] - 0.5 * ahead[2]) / step
        assert to_alpha.item() == pytest.approx(slope.item(), rel=1e-4, abs=1e-5)
        for row, column in ((0, 0), (3, 2), (7, 5), (19, 1)):
            bump = torch.zeros_like(scores)
            bump[row, column] = step
            slope = (total(scores + bump, power) - total(scores - bump, power)) / (2 * step)
            assert to_scores[row, column].item() == pytest.approx(slope.item(), abs=1e-6)


def test_the_value_is_the_convex_conjugate() -> None:
    """No other distribution does better, and its gradient in the scores is the mass."""
    scores, counts = scores_and_counts()
    scores = scores.requires_grad_()
    alpha = torch.tensor(1.5, dtype=torch.float64)
    mass, value = normalise_entmax(scores, counts, alpha)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), scores)[0], mass)

    def objective(p: torch.Tensor) -> torch.Tensor:
        each = p / counts
        tsallis = counts * (each**alpha - each) / (alpha * (alpha - 1))
        return (p * scores - tsallis).sum(-1)

    torch.testing.assert_close(objective(mass), value, atol=1e-11, rtol=0)
    generator = torch.manual_seed(1)
    for _ in range(50):
        other = torch.rand(mass.shape, generator=generator, dtype=torch.float64)
        mixed = 0.9 * mass + 0.1 * other / other.sum(-1, keepdim=True)
        assert (objective(mixed) <= value + 1e-12).all()


def test_an_empty_row_has_no_mass_and_no_gradient() -> None:
    scores = torch.tensor([[0.5, -torch.inf], [-torch.inf, -torch.inf]], requires_grad=True)
    mass, value = normalise_entmax(scores, torch.ones(2), torch.tensor(1.5))
    assert mass.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert value.tolist() == [0.5, -torch.inf]
    gradient = torch.autograd.grad((mass * 3).sum() + value[0], scores)[0]
    assert gradient.tolist() == [[1.0, 0.0], [0.0, 0.0]]


@every_kind
@pytest.mark.parametrize("alpha", [1.3, 2.0])
def test_agrees_with_the_reference(kind: dict[str, Any], alpha: float) -> None:
    for seed in range(2, 6):
        tree = random_tree(seed)
        assert_paths_agree(random_inputs(tree, seed, lead=(1,)), tree, alpha=alpha, **kind)


@every_kind
def test_an_alpha_per_depth_gets_the_gradient_of_finite_differences(kind: dict[str, Any]) -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0)
    arguments = (inputs.query, inputs.key, inputs.value, tree)
    alpha = torch.tensor([1.2, 1.0, 1.6, 1.4], dtype=torch.float64, requires_grad=True)
    combination = torch.randn(inputs.value.shape, generator=torch.manual_seed(0)).double()

    def total(a: torch.Tensor) -> torch.Tensor:
        return (hsa_attention(*arguments, alpha=a, **kind) * combination).sum()

    gradient = torch.autograd.grad(total(alpha), alpha)[0]
    step = 1e-6
    for depth in range(4):
        bump = torch.zeros(4, dtype=torch.float64)
        bump[depth] = step
        with torch.no_grad():
            ahead = [total(alpha + n * bump) for n in range(3)]
            slope = (-1.5 * ahead[0] + 2 * ahead[1] - 0.5 * ahead[2]) / step
        assert gradient[depth].item() == pytest.approx(slope.item(), rel=1e-4, abs=1e-6)
    assert (gradient[:3] != 0).all()
    fast = hsa_attention(*arguments, alpha=alpha, **kind)
    slow = hsa_attention(*arguments, alpha=alpha, impl="reference", **kind)
    torch.testing.assert_close(fast, slow, atol=1e-9, rtol=0)


@every_kind
def test_alpha_one_is_the_softmax_case(kind: dict[str, Any]) -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0)
    arguments = (inputs.query, inputs.key, inputs.value, tree)
    softmax = hsa_attention(*arguments, **kind)
    for alpha in (1, torch.ones(4), torch.tensor(1.0, dtype=torch.float64)):
        torch.testing.assert_close(
            hsa_attention(*arguments, alpha=alpha, **kind), softmax, atol=1e-12, rtol=0
        )
    near = hsa_attention(*arguments, alpha=1 + 1e-7, **kind)
    torch.testing.assert_close(near, softmax, atol=1e-5, rtol=0)


@every_kind
def test_rows_stay_stochastic_and_become_sparse(kind: dict[str, Any]) -> None:
    tree = SignalTree.from_windows(64, (4, 4))
    inputs = random_inputs(tree, 0, strength=2.0)
    matrix = hsa_matrix(inputs.query, inputs.key, tree, alpha=2.0, **kind)
    sums = matrix.sum(-1)
    first = int(kind["causal"] and not kind["include_self"])
    torch.testing.assert_close(sums[:, first:], torch.ones_like(sums[:, first:]))
    dense = hsa_matrix(inputs.query, inputs.key, tree, **kind)
    assert (matrix > 0).sum() < 0.7 * (dense > 0).sum()


def test_one_family_is_entmax_attention() -> None:
    tree = SignalTree.from_parents([-1, *([0] * 9)])
    inputs = random_inputs(tree, 0)
    scores = inputs.query @ inputs.key.transpose(-1, -2) / 3**0.5
    expected = package.entmax15(scores, dim=-1) @ inputs.value
    for tie in ("blocks", "columns"):
        output = hsa_attention(inputs.query, inputs.key, inputs.value, tree, tie=tie, alpha=1.5)
        torch.testing.assert_close(output, expected, atol=1e-10, rtol=0)


@every_kind
def test_energies_are_those_of_the_recursion(kind: dict[str, Any]) -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0)
    result = reference.attention_matrix(
        inputs.query,
        inputs.key,
        reference.from_tree(tree)[0],
        settings_of(tree, inputs, alpha=1.5, **kind),
    )
    expected = torch.stack([result.phi[node] for node in range(tree.num_nodes)], -1)
    energy = hsa_energy(
        inputs.query,
        inputs.key,
        tree,
        position_scores=inputs.position_scores,
        alpha=1.5,
        certificate=False,
        **kind,
    )
    torch.testing.assert_close(energy.phi, expected, atol=1e-9, rtol=0)


def test_no_other_family_weights_give_a_lower_nested_energy() -> None:
    """Minimise the nested objective over all families at once, from any start: it is phi(root)."""
    tree = bushy_tree()
    inputs = random_inputs(tree, 0, lead=(1,))
    query, key = inputs.query[0].detach(), inputs.key[0].detach()
    alpha, scale = 1.5, 3**-0.5
    choices: dict[int, torch.Tensor] = {}

    def tsallis(p: torch.Tensor) -> torch.Tensor:
        return (p**alpha - p) / (alpha * (alpha - 1))

    def energy(node: reference.Node) -> torch.Tensor:
        if node.row is not None:
            return -scale * (query[node.row] * key[node.row]).sum()
        total = torch.zeros((), dtype=torch.float64)
        for place, one in enumerate(node.children):
            free = torch.zeros(len(node.children), dtype=torch.float64, requires_grad=True)
            mass = choices.setdefault(one.number, free).softmax(0)
            cost = mass[place] * energy(one) + tsallis(mass[place])
            mean = query[one.rows()].mean(0)
            for at, other in enumerate(node.children):
                if at != place:
                    count = len(other.rows())
                    score = scale * (mean * key[other.rows()].mean(0)).sum()
                    cost = cost + count * tsallis(mass[at] / count) - mass[at] * score
            total = total + len(one.rows()) / len(node.rows()) * cost
        return total

    root = reference.from_tree(tree)[0]
    energy(root)
    search = torch.optim.LBFGS(list(choices.values()), max_iter=300, line_search_fn="strong_wolfe")

    def evaluate() -> float:
        search.zero_grad()
        value = energy(root)
        value.backward()
        return float(value.detach())

    search.step(evaluate)
    lowest = float(energy(root).detach())
    found = hsa_energy(query[None], key[None], tree, alpha=alpha, certificate=False).phi[0, 0]
    assert found.item() <= lowest + 1e-12
    assert found.item() == pytest.approx(lowest, abs=1e-5)


@every_kind
def test_scores_of_ten_thousand_stay_finite(kind: dict[str, Any]) -> None:
    tree = bushy_tree()
    for dtype in (torch.float32, torch.float64):
        inputs = random_inputs(tree, 0, strength=100.0)
        tensors = [part.detach().to(dtype).requires_grad_() for part in inputs.tensors()[:3]]
        for alpha in (1.001, 1.5, 2.5):
            output = hsa_attention(*tensors, tree, alpha=alpha, scale=1.0, **kind)
            gradients = torch.autograd.grad(output.sum(), tensors)
            assert torch.isfinite(output).all()
            assert all(torch.isfinite(gradient).all() for gradient in gradients)
