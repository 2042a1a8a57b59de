"""The native kernel against the float64 paths, on every instruction set and number of threads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.hsa_accuracy import random_problem, worst_errors
from polyscale.layers.hsa import HTELayer
from polyscale.ops.hsa import hsa_attention
from polyscale.ops.hsa.native import library, plan
from polyscale.ops.hsa.native.op import hsa_attention_native
from polyscale.ops.native import instructions
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import KINDS, bushy_tree, kind_name, random_inputs, random_tree

every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)


@pytest.fixture(params=instructions.NAMES)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    best = instructions.NAMES.index(library.best_instructions())
    # A processor runs its best set in the place of one that it lacks.
    instructions.wanted = instructions.NAMES[min(best, instructions.NAMES.index(request.param))]
    yield instructions.wanted
    instructions.wanted = None


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_auto_takes_the_kernel_where_it_can_run() -> None:
    tree = bushy_tree()
    x = draw(1, 2, tree.num_rows, 8)
    for kind in KINDS:
        by_name = hsa_attention(x, x, x, tree, impl="native", **kind)
        assert torch.equal(hsa_attention(x, x, x, tree, **kind), by_name)


@pytest.mark.parametrize(
    ("dtype", "options", "reason"),
    [
        (torch.float64, {}, "it takes float32 and bfloat16, got torch.float64"),
        (torch.float16, {}, "it takes float32 and bfloat16, got torch.float16"),
        (torch.float32, {"alpha": 1.5}, "softmax families only"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(
    dtype: torch.dtype, options: dict[str, Any], reason: str
) -> None:
    x = draw(2, bushy_tree().num_rows, 4).to(dtype)
    with pytest.raises(ValueError, match=reason):
        hsa_attention(x, x, x, bushy_tree(), impl="native", **options)


def test_random_problems_are_as_exact_as_float32_allows(instruction_set: str) -> None:
    for seed in range(25):
        values, gradients = worst_errors(random_problem(seed))
        assert values < 2e-6, seed
        assert gradients < 2e-5, seed


@every_kind
def test_sixteen_bits_are_computed_in_float32(kind: dict[str, Any]) -> None:
    forest = SignalTree.batch(
        [random_tree(1), SignalTree.from_parents([-1, 0, 1, 2]), bushy_tree()]
    )
    query = draw(1, 4, forest.num_rows, 8).bfloat16().requires_grad_()
    key, value = (
        draw(1, 2, forest.num_rows, 8, seed=n).bfloat16().requires_grad_() for n in (1, 2)
    )
    places = (0.5 * draw(4, forest.num_nodes, 3, seed=3)).requires_grad_()
    ignored = (torch.arange(forest.num_rows) % 5 == 0)[None]
    options = {"key_padding_mask": ignored, "enable_gqa": True, **kind}
    tensors = [query, key, value, places]
    output = hsa_attention(*tensors[:3], forest, position_scores=places, impl="native", **options)
    weight = draw(*output.shape, seed=4).bfloat16()
    found = torch.autograd.grad(output, tensors, weight, materialize_grads=True)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected = hsa_attention(*wide[:3], forest, position_scores=wide[3], impl="torch", **options)
    known = torch.autograd.grad(expected, wide, weight.double(), materialize_grads=True)
    assert [x.dtype for x in found] == [x.dtype for x in tensors]
    # Half a step of bfloat16 for what is rounded to it once, and float32's error for what is not.
    for one, other in zip([output, *found], [expected, *known], strict=True):
        step = 2**-8 if one.dtype == torch.bfloat16 else 1e-5
        assert ((one.double() - other).abs() <= step * other.abs() + 1e-5 * other.abs().max()).all()


@every_kind
def test_trees_of_many_chunks_agree_with_torch(kind: dict[str, Any]) -> None:
    for rows, windows in ((700, (2, 4, 8, 16)), (600, ()), (900, (3, 70))):
        tree = SignalTree.from_windows(rows, windows)
        single = [draw(1, 2, rows, 8, seed=n).requires_grad_() for n in range(3)]
        double = [x.detach().double().requires_grad_() for x in single]
        output = hsa_attention(*single, tree, impl="native", **kind)
        expected = hsa_attention(*double, tree, **kind)
        torch.testing.assert_close(output.double(), expected, atol=3e-6, rtol=0)
        weight = draw(*output.shape, seed=9)
        found = torch.autograd.grad(output, single, weight)
        wanted = torch.autograd.grad(expected, double, weight.double())
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=0)


@every_kind
def test_the_same_bits_on_any_number_of_threads(kind: dict[str, Any]) -> None:
    tree = SignalTree.from_windows(1500, (2, 4, 8))
    single = [draw(1, 1, 1500, 16, seed=n).requires_grad_() for n in range(3)]
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        output = hsa_attention(*single, tree, impl="native", **kind)
        found.append([output, *torch.autograd.grad(output.square().sum(), single)])
    torch.set_num_threads(1)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@every_kind
def test_query_heads_share_a_key_head(kind: dict[str, Any]) -> None:
    tree = random_tree(3)
    query = draw(2, 6, tree.num_rows, 8).requires_grad_()
    key, value = (draw(2, 2, tree.num_rows, 8, seed=n).requires_grad_() for n in (1, 2))
    shared = hsa_attention(query, key, value, tree, enable_gqa=True, **kind)
    repeated = [part.repeat_interleave(3, dim=1) for part in (key, value)]
    expected = hsa_attention(query, *repeated, tree, **kind)
    torch.testing.assert_close(shared, expected)
    tensors = (query, key, value)
    found = torch.autograd.grad(shared.square().sum(), tensors, allow_unused=True)
    wanted = torch.autograd.grad(expected.square().sum(), tensors, allow_unused=True)
    torch.testing.assert_close(found, wanted)
    slow = hsa_attention(query, key, value, tree, enable_gqa=True, impl="reference", **kind)
    torch.testing.assert_close(shared, slow, atol=1e-5, rtol=0)


def test_heads_that_do_not_divide_are_refused() -> None:
    tree = bushy_tree()
    query, key = draw(4, tree.num_rows, 8), draw(3, tree.num_rows, 8)
    with pytest.raises(ValueError, match=r"key must .* a number of heads that divides 4"):
        hsa_attention(query, key, key, tree, enable_gqa=True)


@every_kind
@pytest.mark.parametrize("impl", ["torch", "native"])
def test_log_sums_are_those_of_the_reference(kind: dict[str, Any], impl: str) -> None:
    forest = SignalTree.batch([random_tree(1), SignalTree.from_parents([-1]), random_tree(2)])
    ignored = torch.zeros(2, forest.num_rows, dtype=torch.bool)
    ignored[0, ::4] = True
    inputs = random_inputs(forest, 0, lead=(2, 2)).tensors()[:3]
    options = {"key_padding_mask": ignored, "return_lse": True, **kind}
    dtype = torch.float64 if impl == "torch" else torch.float32
    ours = [x.detach().to(dtype).requires_grad_() for x in inputs]
    output, lse = hsa_attention(*ours, forest, impl=impl, **options)
    expected, wanted = hsa_attention(*inputs, forest, impl="reference", **options)
    last = forest.num_rows if kind["tie"] == "columns" else forest.num_trees
    assert lse.shape == (2, 2, last)
    torch.testing.assert_close(output.double(), expected, atol=3e-6, rtol=0)
    torch.testing.assert_close(lse.double(), wanted, atol=3e-6, rtol=0)
    weight = draw(*lse.shape)
    sums = [(weight.to(x.dtype) * torch.where(x.isfinite(), x, 0.0)).sum() for x in (lse, wanted)]
    found = torch.autograd.grad(sums[0], ours[:2], materialize_grads=True)
    known = torch.autograd.grad(sums[1], inputs[:2], materialize_grads=True)
    for one, other in zip(found, known, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=0)


def test_parts_merge_by_their_log_sums() -> None:
    # What six rows see of the first half, and of the second, makes what they see of both.
    whole, half = SignalTree.from_windows(12), SignalTree.from_windows(6)
    query, key, value = (draw(1, 2, 12, 8, seed=n) for n in range(3))
    first = [part[:, :, :6] for part in (query, key, value)]
    one, one_sums = hsa_attention(*first, half, tie="columns", return_lse=True)
    full, sums = hsa_attention(query, key, value, whole, tie="columns", return_lse=True)
    scores = first[0] @ key[:, :, 6:].mT / 8**0.5
    other, other_sums = scores.softmax(-1) @ value[:, :, 6:], scores.logsumexp(-1)
    weight = torch.sigmoid(one_sums - other_sums)[..., None]
    torch.testing.assert_close(weight * one + (1 - weight) * other, full[:, :, :6])
    torch.testing.assert_close(torch.logaddexp(one_sums, other_sums), sums[:, :, :6])


@every_kind
def test_the_operations_pass_torchs_own_checks(kind: dict[str, Any]) -> None:
    tree = bushy_tree()
    query, key, value = (draw(1, 2, tree.num_rows, 4, seed=n).requires_grad_() for n in range(3))
    places = draw(2, tree.num_nodes, 3).requires_grad_()
    options = (kind["tie"] == "columns", kind["causal"], kind["include_self"], 0.5)
    arguments = (query, key, value, plan.plan_of(tree), None, places, places, *options)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(hsa_attention_native, arguments, test_utils=tests)
    torch.library.opcheck(plan.plan_in_graph, (plan.tree_tensors(tree),), test_utils=tests)


@pytest.mark.parametrize("tie", ["blocks", "columns"])
def test_fresh_trees_compile_without_a_break_and_stop_recompiling(tie: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attend(x: Tensor, tree: SignalTree) -> Tensor:
        return hsa_attention(x, x, x, tree, tie=tie, causal=tie == "columns")

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for seed in range(8):
        tree = SignalTree.batch([random_tree(seed, 40), random_tree(seed + 50, 40)])
        x = draw(2, tree.num_rows, 8, seed=seed).requires_grad_()
        output = compiled(x, tree)
        torch.testing.assert_close(output, attend(x, tree))
        output.sum().backward()
    assert counter.frame_count <= 3


def test_columns_with_a_cause_and_padding_compile_without_a_break() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attend(x: Tensor, tree: SignalTree, ignored: Tensor) -> Tensor:
        options: dict[str, Any] = {"tie": "columns", "causal": True, "key_padding_mask": ignored}
        return hsa_attention(x, x, x, tree, **options)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for rows in (40, 57, 64, 90, 121, 33):
        tree = SignalTree.from_windows(rows, (2, 4))
        ignored = torch.arange(rows) >= torch.tensor([[rows], [rows - 9]])
        inputs = [draw(2, 2, rows, 8, seed=rows).requires_grad_() for _ in range(2)]
        outputs = [run(x, tree, ignored) for run, x in zip((compiled, attend), inputs, strict=True)]
        torch.testing.assert_close(*outputs)
        gradients = [
            torch.autograd.grad(output.square().sum(), x)
            for output, x in zip(outputs, inputs, strict=True)
        ]
        torch.testing.assert_close(*gradients)
    assert counter.frame_count <= 3


def test_layers_compile_without_a_break_and_an_encoder_of_a_fixed_tree_is_exported() -> None:
    tree = SignalTree.from_windows(30, (2, 4))

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(HTELayer(16, 2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, tree)
            return x.mean(1)

    encoder, x = Encoder().eval(), draw(2, 30, 16)
    expected = encoder(x)
    torch._dynamo.reset()
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    exported = torch.export.export(encoder, (x,))
    assert any("hsa_attention" in str(node.target) for node in exported.graph.nodes)
    other = draw(2, 30, 16, seed=5)
    torch.testing.assert_close(exported.module()(other), encoder(other))


def test_equal_trees_share_a_plan_that_goes_with_the_last() -> None:
    parents = [-1, 0, 0, 0, 1, 1, 1, 2, 2]
    trees = [SignalTree.from_parents(parents) for _ in range(3)]
    plans = [plan.plan_of(tree) for tree in trees]
    assert all(each is plans[0] for each in plans)
    assert plan.plan_of(SignalTree.from_windows(10)) is not plans[0]
    gone, keys = weakref.ref(plans[0]), [id(tree) for tree in trees]
    del plans
    trees.pop()
    gc.collect()
    assert gone() is not None
    trees.clear()
    gc.collect()
    assert gone() is None
    assert not any(key in plan._by_tree for key in keys)


def test_a_plan_holds_every_node_once_and_fits_what_a_compiler_is_told() -> None:
    for seed in range(40):
        tree = random_tree(seed, max_leaves=60, max_family=40)
        made = plan.plan_of(tree)
        assert made.numel() <= plan.plan_room(tree.num_nodes, tree.num_rows)
        size, nodes, rows, trees = made[:4].tolist()
        assert (nodes, rows, trees) == (tree.num_nodes, tree.num_rows, tree.num_trees)
        assert size == made.numel()


def test_a_causal_tree_out_of_order_is_refused_in_a_compiled_graph_too() -> None:
    tree = SignalTree.from_parents([2, 2, -1], rows=[1, 0, -1])
    x = draw(1, 1, 2, 4)
    with pytest.raises(ValueError, match="in increasing order"):
        hsa_attention_native(x, x, x, plan.plan_of(tree), None, None, None, True, True, True, 0.5)


def test_gradients_of_gradients_say_where_they_are_had() -> None:
    tree = bushy_tree()
    x = draw(1, tree.num_rows, 4).requires_grad_()
    output = hsa_attention(x, x, x, tree)
    (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="use impl='torch'"):
        first.sum().backward()
