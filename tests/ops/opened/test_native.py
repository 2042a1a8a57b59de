"""The native kernel in float32 and bfloat16 against the reference in float64."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyscale as ps
from polyscale.ops.opened.fused import attend_to_choice, opened_attention_native
from polyscale.ops.opened.native import op
from polyscale.ops.opened.native.library import LIBRARY
from polyscale.ops.opened.reference import attend, opened_attention_reference
from tests.ops.opened.cases import padding_of, places_of, random_case, settings_of

NO_KERNEL = LIBRARY.why_not_built()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")


def assert_native_equals_the_reference(tensors, places, chosen, atol=1e-5):
    """Values and gradients given the same choice; the choice itself; what it keeps."""
    exact = [x.detach().double().requires_grad_() for x in tensors]
    output, found = opened_attention_native(*tensors, places, chosen)
    _, expected = opened_attention_reference(*exact, places, chosen)
    assert_same_choice(found, expected, chosen)
    reference, _ = attend(*exact, found.opened, places, chosen)
    torch.testing.assert_close(output.double(), reference, atol=atol, rtol=1e-4)
    cotangent = torch.randn_like(output)
    for ours, theirs in zip(
        torch.autograd.grad(output, tensors, cotangent),
        torch.autograd.grad(reference, exact, cotangent.double()),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs, atol=2 * atol, rtol=1e-4)


def assert_same_choice(found, expected, chosen):
    assert torch.equal(found.rows, expected.rows)
    assert found.opened.shape == expected.opened.shape
    if not torch.equal(found.opened, expected.opened):  # near-ties, rarely
        assert (found.opened != expected.opened).sum() <= 2
        return
    there = (found.rows >= 0)[:, None].expand_as(found.kept)
    for ours, theirs in ((found.kept, expected.kept), (found.kl, expected.kl)):
        torch.testing.assert_close(ours.double()[there], theirs[there], atol=1e-5, rtol=1e-5)


VARIANTS = [
    {},
    {"causal": False},
    {"mass": 0.9},
    {"mass": 0.9, "causal": False},
    {"near": 37},
    {"near": 37, "mass": 0.7, "causal": False},
    {"strict": True},
    {"strict": True, "near": 20, "mass": 0.9},
    {"rest": "pool"},
    {"rest": "pool", "causal": False, "near": 37},
    {"rest": "pool", "strict": True, "near": 3},
    {"block": 48, "key_block": 48, "heavy": 96, "sample": 6},
    {"block": 8, "key_block": 1, "heavy": 20, "near": 0},
    {"block": 192, "key_block": 192, "heavy": 192, "sample": 1},
]


@pytest.mark.parametrize("sinks", [16, [3, 70, 111]], ids=str)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_values_gradients_and_choice_are_those_of_the_reference(options, sinks):
    torch.manual_seed(0)
    tensors = random_case(300, dtype=torch.float32)
    places = places_of(*tensors[:2], sinks=sinks)
    assert_native_equals_the_reference(tensors, places, settings_of(**options))


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"rest": "pool"}, {"strict": True}])
@pytest.mark.parametrize("side", ["left", "right", "between"])
@pytest.mark.parametrize("queries", [300, 150])
def test_padding_on_any_side(queries, side, options):
    torch.manual_seed(0)
    tensors = random_case(queries, 300, dtype=torch.float32)
    places = places_of(*tensors[:2], padding=padding_of(side, 300))
    assert_native_equals_the_reference(tensors, places, settings_of(**options))


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"rest": "pool"}, {"strict": True}])
def test_packed_sequences(options):
    torch.manual_seed(0)
    tensors = random_case(301, batch=1, dtype=torch.float32)
    bounds = torch.tensor([0, 100, 107, 171, 301])
    places = places_of(*tensors[:2], cu_seqlens=bounds)
    assert_native_equals_the_reference(tensors, places, settings_of(**options))


@pytest.mark.parametrize("queries", [1, 70, 172, 299])
@pytest.mark.parametrize("strict", [False, True])
def test_queries_that_begin_anywhere(queries, strict):
    torch.manual_seed(0)
    tensors = random_case(queries, 300, dtype=torch.float32)
    chosen = settings_of(strict=strict)
    assert_native_equals_the_reference(tensors, places_of(*tensors[:2]), chosen)


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "value_width"),
    [(1, 1, 1, 1), (2, 2, 8, 64), (9, 3, 64, 64), (8, 1, 40, 72), (4, 4, 256, 5)],
)
def test_any_grouping_and_head_dimension(heads, key_heads, width, value_width):
    torch.manual_seed(0)
    tensors = random_case(
        200,
        heads=heads,
        key_heads=key_heads,
        width=width,
        value_width=value_width,
        dtype=torch.float32,
    )
    assert_native_equals_the_reference(tensors, places_of(*tensors[:2]), settings_of(width))


@pytest.mark.parametrize("instructions", ["portable", "avx2"])  # the best are run everywhere else
@pytest.mark.parametrize("options", VARIANTS[:2] + VARIANTS[5:9], ids=str)
def test_lesser_instructions_give_the_same(options, instructions, monkeypatch):
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    torch.manual_seed(0)
    tensors = random_case(200, width=40, value_width=24, dtype=torch.float32)
    assert_native_equals_the_reference(tensors, places_of(*tensors[:2]), settings_of(40, **options))


@given(
    queries=st.integers(1, 90),
    before=st.integers(0, 60),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    width=st.sampled_from([1, 7, 16]),
    key_block=st.sampled_from([1, 4, 16]),
    near=st.integers(0, 40),
    heavy=st.integers(0, 3),
    mass=st.sampled_from([None, 0.0, 0.6, 1.0]),
    sinks=st.integers(0, 20),
    sample=st.sampled_from([1, 4, 16]),
    mode=st.sampled_from(["causal", "strict", "both"]),
    rest=st.sampled_from(["drop", "pool"]),
    layout=st.sampled_from(["plain", "left", "right", "between", "packed"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_random_problems(
    queries,
    before,
    heads,
    width,
    key_block,
    near,
    heavy,
    mass,
    sinks,
    sample,
    mode,
    rest,
    layout,
    seed,
):
    torch.manual_seed(seed)
    keys = queries + before
    tensors = random_case(
        keys if layout == "packed" else queries,
        keys,
        batch=1 if layout == "packed" else 2,
        heads=heads[0],
        key_heads=heads[1],
        width=width,
        dtype=torch.float32,
    )
    chosen = settings_of(
        width,
        block=16,
        key_block=key_block,
        near=near,
        heavy=heavy * key_block,
        mass=mass,
        sample=sample,
        causal=mode != "both",
        strict=mode == "strict",
        rest=rest,
    )
    padding = padding_of(layout, keys) if layout in ("left", "right", "between") else None
    bounds = torch.tensor(sorted({0, keys // 3, keys})) if layout == "packed" else None
    places = places_of(*tensors[:2], padding, bounds, sinks)
    assert_native_equals_the_reference(tensors, places, chosen)


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"rest": "pool", "causal": False}])
def test_any_number_of_threads_gives_the_same_bits(options):
    torch.manual_seed(0)
    tensors = random_case(700, heads=6, key_heads=2, width=64, value_width=64, dtype=torch.float32)
    cotangent = torch.randn(2, 6, 700, 64)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            output, audit = ps.opened_attention(
                *tensors, heavy=128, impl="native", return_audit=True, **options
            )
            gradients = torch.autograd.grad(output, tensors, cotangent)
            results.append((output, audit.kept, audit.opened, *gradients))
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_errs_at_most_twice_as_much_as_sdpa(causal):
    torch.manual_seed(0)
    tensors = random_case(257, heads=2, width=64, value_width=64, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    ours = ps.opened_attention(*tensors, causal=causal, heavy=512, impl="native")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    theirs, expected = sdpa(*tensors, is_causal=causal), sdpa(*exact, is_causal=causal)
    assert ours.dtype == torch.bfloat16
    cotangent = torch.randn_like(theirs)
    for mine, standard, true in zip(
        (ours, *torch.autograd.grad(ours, tensors, cotangent)),
        (theirs, *torch.autograd.grad(theirs, tensors, cotangent)),
        (expected, *torch.autograd.grad(expected, exact, cotangent.double())),
        strict=True,
    ):
        assert (mine - true).norm() <= 2 * (standard - true).norm()


@pytest.mark.parametrize("options", [{"rest": "pool"}, {"strict": True}], ids=str)
def test_bfloat16_is_the_reference_up_to_its_own_rounding(options):
    torch.manual_seed(0)
    tensors = random_case(150, 300, dtype=torch.bfloat16)
    places, chosen = places_of(*tensors[:2], padding_of("left", 300)), settings_of(**options)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    output, found = opened_attention_native(*tensors, places, chosen)
    expected, choice = opened_attention_reference(*exact, places, chosen)
    assert_same_choice(found, choice, chosen)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=2e-2)
    cotangent = torch.randn_like(output)
    for ours, theirs in zip(
        torch.autograd.grad(output, tensors, cotangent),
        torch.autograd.grad(expected, exact, cotangent.double()),
        strict=True,
    ):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()


def test_a_choice_made_elsewhere_is_attended_to():
    torch.manual_seed(0)
    tensors = random_case(301, batch=1, dtype=torch.float32)
    bounds = torch.tensor([0, 100, 107, 301])
    for places in (places_of(*tensors[:2]), places_of(*tensors[:2], cu_seqlens=bounds)):
        chosen = settings_of()
        shape = places.query_blocks(chosen)[1], places.key_blocks(chosen)[1]
        opened = torch.rand(1, 2, *shape) < 0.3
        exact = [x.detach().double() for x in tensors]
        expected, log_sum = attend(*exact, opened, places, chosen)
        output, ours = attend_to_choice(*tensors, opened, places, chosen)
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.double(), log_sum, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["heads last", "narrowed", "broadcast"])
def test_any_strides(layout):
    torch.manual_seed(0)
    query, key, value = (x.detach() for x in random_case(150, dtype=torch.float32))
    if layout == "heads last":
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    elif layout == "narrowed":
        strided = [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in (query, key, value)]
    else:
        query, key, value = (x[:1].expand(2, -1, -1, -1) for x in (query, key, value))
        strided = [x.contiguous() for x in (query, key, value)]
    expected = ps.opened_attention(query, key, value, heavy=32, near=16, impl="native")
    output = ps.opened_attention(*strided, heavy=32, near=16, impl="native")
    assert torch.equal(output, expected)


def test_an_empty_batch_gives_an_empty_result():
    tensors = random_case(70, batch=0, dtype=torch.float32)
    output = ps.opened_attention(*tensors, impl="native")
    assert output.shape == (0, 4, 70, 8)
    assert [g.shape for g in torch.autograd.grad(output.sum(), tensors)] == [
        x.shape for x in tensors
    ]


def test_torch_accepts_the_operations():
    torch.manual_seed(0)
    tensors = random_case(70, batch=1, dtype=torch.float32)
    sinks = torch.zeros(1, 70, dtype=torch.uint8)
    numbers = [1, 0, 0, 64, 16, 64, 4, 8, 1]
    choose = (*(x.detach() for x in tensors[:2]), sinks, None, numbers, [2, 1, 9], 0.0, 0.25)
    torch.library.opcheck(op.choose, choose)
    opened, _, _ = op.choose(*choose)
    torch.library.opcheck(op.attend, (*tensors, sinks, None, opened, numbers, 0.25))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_memory_of_long_prompts_is_linear():
    # 16k queries and keys: one row of scores per query would be a gigabyte.
    from benchmarks.timing import added_memory

    x = torch.randn(1, 1, 16384, 16)
    grew = added_memory(lambda: ps.opened_attention(x, x, x, impl="native"))
    assert grew < 64 * 2**20
