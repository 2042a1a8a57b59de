"""The Triton kernels as an operator: precision, cost, memory, compilation; in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

import polyscale as ps
from polyscale.ops.hkt import triton as implementation
from polyscale.ops.layout import PackedLayout
from tests.ops.hkt.cases import gradients, random_case
from tests.ops.hkt.test_values import side_padding


@pytest.mark.usefixtures("_bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "head_dim"), [(64, 32), (130, 64)])
def test_half_precision_errs_at_most_twice_as_much_as_sdpa(dtype, causal, length, head_dim):
    for levels in (1, 3):
        queries, keys, value, weights = random_case(
            length, levels, batch=1, head_dim=head_dim, value_dim=head_dim, dtype=dtype
        )
        exact = ps.hkt_attention(
            [q.double() for q in queries],
            [k.double() for k in keys],
            value.double(),
            weights.double(),
            causal=causal,
            impl="reference",
        )
        ours = ps.hkt_attention(queries, keys, value, weights.float(), causal=causal, impl="triton")
        assert ours.dtype == dtype
        inputs = [queries[0], keys[0], value]
        standard = F.scaled_dot_product_attention(*inputs, is_causal=causal)
        standard_exact = F.scaled_dot_product_attention(
            *(x.double() for x in inputs), is_causal=causal
        )
        limit = 2 * (standard.double() - standard_exact).abs().max()
        assert (ours.double() - exact).abs().max() <= limit


@pytest.mark.usefixtures("_bfloat16")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2.5e-3)])
def test_gradients_in_half_precision_are_the_exact_ones_to_a_few_roundings(dtype, tolerance, tiles):
    tiles(32, 32)
    case = random_case(40, 5, batch=1, heads=1, head_dim=16, value_dim=16, dtype=dtype)
    queries, keys, value, weights = case
    wide = (
        [q.detach().double().requires_grad_() for q in queries],
        [k.detach().double().requires_grad_() for k in keys],
        value.detach().double().requires_grad_(),
        weights.detach().double().requires_grad_(),
    )
    actual = gradients(ps.hkt_attention(*case, impl="triton"), case)
    exact = gradients(ps.hkt_attention(*wide, impl="reference"), wide)
    for ours, expected in zip(actual, exact, strict=True):
        assert ours.dtype == dtype
        error = (ours.double() - expected).norm() / expected.norm()
        assert error <= tolerance


def test_bfloat16_is_refused_where_the_interpreter_would_get_it_wrong():
    case = random_case(8, 2, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="float32 or float16 in Triton's interpreter"):
        ps.hkt_attention(*case, impl="triton")


@pytest.mark.parametrize(("levels", "ratio"), [(1, 1.0), (2, 1.25), (3, 1.3125)])
def test_score_products_cost_what_the_paper_says(levels, ratio, monkeypatch, tiles):
    tiles(64, 64)
    counted = []
    dot = interpreter.InterpreterBuilder.create_dot

    def counting(self, left, right, *others):
        rows, inner = left.data.shape
        counted.append(rows * inner * right.data.shape[1])
        return dot(self, left, right, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counting)
    case = random_case(
        128, levels, batch=1, heads=1, head_dim=16, value_dim=16, dtype=torch.float32
    )
    output = ps.hkt_attention(*case, causal=False, impl="triton")
    product = 128 * 128 * 16  # of one T x T matrix product: q k^T, or attention times value
    assert sum(counted) == (ratio + 1) * product
    counted.clear()
    # Scores again in both kernels, the gradient by the scores in both, that by the value, and
    # the products that take it to queries and keys.
    gradients(output, case)
    assert sum(counted) == (2 * ratio + 2 + 1 + 2 * ratio) * product


def test_memory_is_linear_in_the_length(tiles):
    tiles(64, 64)
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            sizes.extend(tensor.numel() for tensor in tensors)
            return result

    case = random_case(257, 3, batch=1, heads=1, dtype=torch.float32)
    with Watch():
        gradients(ps.hkt_attention(*case, impl="triton"), case)
    assert max(sizes) <= 257 * 4


def test_torch_finds_the_operators_well_formed(tiles):
    tiles(16, 16)
    layout = PackedLayout.from_cu_seqlens(torch.tensor([0, 5, 11]), 2)
    queries, keys, value, weights = random_case(
        11, 2, batch=1, heads=1, sequences=[5, 6], dtype=torch.float32
    )
    rest = (torch.tensor([5, 6], dtype=torch.int32), torch.stack(layout.level_starts, 1))
    rest = (*rest, True, 0.5, 6)
    operands = (queries, keys, value, weights, *rest)
    torch.library.opcheck(torch.ops.polyscale.hkt_triton.default, operands)
    with torch.no_grad():
        output, logsumexp = torch.ops.polyscale.hkt_triton(*operands)
    plain = ([q.detach() for q in queries], [k.detach() for k in keys], value.detach())
    backward = (torch.ones_like(output), *plain, weights.detach(), output, logsumexp, *rest)
    torch.library.opcheck(torch.ops.polyscale.hkt_triton_backward.default, backward)


def test_a_compiled_graph_takes_it_whole_and_gives_the_same(tiles):
    tiles(16, 16)
    case = random_case(9, 3, heads=1, dtype=torch.float32)
    mask = side_padding(9, "left")

    def attend(queries, keys, value, weights):
        return ps.hkt_attention(queries, keys, value, weights, key_padding_mask=mask, impl="triton")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    output, expected = compiled(*case), attend(*case)
    assert torch.equal(output, expected)
    for ours, plain in zip(gradients(output, case), gradients(expected, case), strict=True):
        assert torch.equal(ours, plain)


def test_it_says_that_it_is_available():
    assert implementation.why_unavailable() is None
    assert not isinstance(implementation._kernels().forward_kernel, triton.JITFunction)


def test_where_shared_memory_is_short_the_next_smaller_tiles_are_taken(monkeypatch):
    def limited(kernel):
        class Limited:
            def __getitem__(self, grid):
                def launch(*arguments, **settings):
                    taken.append(settings["BLOCK_M"])
                    if settings["BLOCK_M"] > 16:
                        raise triton.OutOfResources(settings["BLOCK_M"], 16, "shared memory")
                    kernel[grid](*arguments, **settings)

                return launch

        return Limited()

    taken: list[int] = []
    kernels = implementation._kernels()
    for name in ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel"):
        monkeypatch.setattr(kernels, name, limited(getattr(kernels, name)))
    case = random_case(20, 3, batch=1, heads=1, dtype=torch.float32)
    output = ps.hkt_attention(*case, impl="triton")
    expected = ps.hkt_attention(*case, impl="reference")
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    for ours, exact in zip(gradients(output, case), gradients(expected, case), strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-4, rtol=0)
    assert taken == [32, 16] * 3
