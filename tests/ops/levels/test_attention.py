"""Attention over a store of levels: the reference, and the kernel against it."""

import pytest
import torch
from hypothesis import given, settings, strategies

import polyscale as ps
from polyscale.ops.levels import LevelSettings, LevelStore, level_attention, level_audit
from polyscale.ops.levels.blocks import coarse_level, exact_level
from polyscale.ops.levels.native import op
from polyscale.ops.levels.reference import (
    Opening,
    _always_opened,
    attention_rows,
    level_attention_reference,
)
from polyscale.ops.native import instructions
from tests.ops.levels.cases import (
    NAMES,
    SETTINGS,
    attention_by_loops,
    random_tokens,
    store_of,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def assert_native_equals_the_reference(query, store, opening):
    """Given the kernel's own choice; the choice itself up to tokens of equal mass."""
    scale = query.shape[-1] ** -0.5
    output, opened, counts = op.attend_with_choice(query, store, opening, scale)
    if query.dtype == torch.float32:
        query = query.double()
    mine = torch.zeros(*opened.shape[:3], store.longest, dtype=torch.bool)
    place = torch.arange(opened.shape[3])
    taken = place < counts[..., None]
    mine = mine.long().scatter_add(3, opened.clamp(min=0).long(), taken.long())
    assert mine.max() <= 1  # none twice
    mine = mine.bool() | _always_opened(store, opening.near, query.shape[2])[1]
    expected = level_attention_reference(query, store, opening, scale, mine)
    size = expected.double().abs().max().clamp(min=1e-30)
    assert (output.double() - expected.double()).abs().max() <= TOLERANCE[output.dtype] * size
    rows = attention_rows(query, store, opening, scale)
    where = mine != rows.opened
    if where.any():  # the masses of what one opened and not the other
        free = Opening(opening.near, 0)
        mass = attention_rows(query, store, free, scale).weights.sum(2)
        for b, h, q in where.any(-1).nonzero().tolist():
            differing = mass[b, h, q][where[b, h, q]]
            assert differing.max() - differing.min() < 1e-4 * differing.max() + 1e-30


def test_the_reference_is_what_plain_loops_compute():
    key, value = random_tokens(150, batch=1, heads=1, width=8, value_width=4)
    store = store_of(key.double(), value.double())
    query = torch.randn(1, 2, 1, 8, dtype=torch.float64)
    coarse, exact = coarse_level(store, torch.float64), exact_level(store, torch.float64)
    expected = attention_by_loops(
        query[0, :, 0],
        (coarse[0][0, 0], coarse[1][0, 0]),
        (exact[0][0, 0], exact[1][0, 0]),
        near=10,
        heavy=12,
        sinks=16,
    )
    actual = level_attention(query, store, near=10, heavy=12)
    assert torch.allclose(actual[0, :, 0], expected, atol=1e-12)


def test_with_everything_opened_it_is_softmax_attention():
    key, value = random_tokens(200, heads=1)
    store = store_of(key, value)
    query = torch.randn(2, 3, 1, 32)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    for options in ({"near": 200}, {"heavy": 200}, {"mass": 1.0}):
        for impl in ("reference", "native"):
            actual = level_attention(query, store, impl=impl, **options)
            assert torch.allclose(actual, expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", SETTINGS, ids=NAMES)
def test_the_kernel_equals_the_reference(level, dtype):
    key, value = (x.to(dtype) for x in random_tokens(900, value_width=48))
    store = store_of(key, value, level)
    query = torch.randn(2, 6, 1, 32).to(dtype)
    for opening in (Opening(), Opening(0, 10), Opening(100, 0), Opening(64, 64, 0.7)):
        assert_native_equals_the_reference(query, store, opening)


@pytest.mark.parametrize("wanted", ["portable", "avx2", None])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (1, 2), (3, 3), (2, 6), (1, 7)])
def test_every_instruction_set_and_group_of_heads(heads, group, wanted, monkeypatch):
    monkeypatch.setattr(instructions, "wanted", wanted)
    key, value = random_tokens(400, batch=1, heads=heads, width=80, value_width=40)
    query = torch.randn(1, heads * group, 2, 80)
    for level in SETTINGS:
        assert_native_equals_the_reference(query, store_of(key, value, level), Opening(20, 30))


@settings(max_examples=25, deadline=None)
@given(
    tokens=strategies.integers(1, 700),
    queries=strategies.integers(1, 4),
    near=strategies.integers(0, 150),
    heavy=strategies.integers(0, 150),
    mass=strategies.none() | strategies.floats(0.0, 1.0),
    sinks=strategies.sampled_from([0, 1, 16, 64, 100]),
    kind=strategies.sampled_from(SETTINGS),
    seed=strategies.integers(0, 2**16),
)
def test_random_problems(tokens, queries, near, heavy, mass, sinks, kind, seed):
    torch.manual_seed(seed)
    key, value = random_tokens(tokens, width=16, value_width=16)
    real = torch.rand(2, tokens) < 0.9
    real[:, -1] = True
    store = store_of(key, value, LevelSettings(kind.bits, kind.exact, sinks), real)
    query = torch.randn(2, 4, queries, 16)
    assert_native_equals_the_reference(query, store, Opening(near, heavy, mass))


@pytest.mark.parametrize("level", SETTINGS, ids=NAMES)
def test_bits_do_not_depend_on_the_number_of_threads(level):
    key, value = random_tokens(2000)
    query = torch.randn(2, 4, 2, 32)
    outputs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            store = store_of(key, value, level)
            outputs.append(level_attention(query, store, impl="native"))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("impl", ["reference", "native"])
@pytest.mark.parametrize("level", SETTINGS, ids=NAMES)
def test_every_row_of_a_padded_batch_equals_the_row_alone(level, impl):
    key, value = random_tokens(300, batch=3)
    lengths = [300, 131, 64]
    real = torch.arange(300) >= 300 - torch.tensor(lengths)[:, None]
    query = torch.randn(3, 4, 2, 32)
    together = level_attention(query, store_of(key, value, level, real), impl=impl)
    for row, length in enumerate(lengths):
        tokens = (x[row : row + 1, :, 300 - length :] for x in (key, value))
        alone = level_attention(query[row : row + 1], store_of(*tokens, level), impl=impl)
        if impl == "native":
            assert torch.equal(together[row], alone[0])
        assert torch.allclose(together[row], alone[0], atol=1e-6)


def test_beams_go_on_as_rows_of_their_own():
    key, value = random_tokens(200, batch=2)
    store = store_of(key, value)
    query = torch.randn(2, 2, 1, 32)
    before = level_attention(query, store)
    store.select(torch.tensor([1, 1, 0]))
    assert torch.equal(level_attention(query[[1, 1, 0]], store), before[[1, 1, 0]])


@pytest.mark.parametrize("impl", ["reference", "native"])
@pytest.mark.parametrize("bits", [(4, 4), (4, 2)])
def test_several_new_tokens_are_what_one_by_one_is(bits, impl):
    key, value = random_tokens(200)
    query = torch.randn(2, 2, 80, 32)
    level = LevelSettings(bits)
    together = level_attention(query, store_of(key, value, level), impl=impl, heavy=20)
    store = store_of(key[:, :, :120], value[:, :, :120], level)
    for n in range(80):
        new = slice(120 + n, 121 + n)
        store.append(key[:, :, new], value[:, :, new])
        one = level_attention(query[:, :, n : n + 1], store, impl=impl, heavy=20)
        assert torch.allclose(together[:, :, n : n + 1], one, atol=1e-6)


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_queries_before_the_first_token_are_zeros(impl):
    key, value = random_tokens(3)
    output = level_attention(torch.randn(2, 2, 5, 32), store_of(key, value), impl=impl)
    assert (output[:, :, :2] == 0).all()
    assert torch.allclose(output[:, :, 2], value[:, :, 0], atol=1e-6)


def test_a_share_of_the_mass_opens_as_few_as_hold_it():
    key, value = random_tokens(900)
    store, query = store_of(key, value), 2 * torch.randn(2, 4, 1, 32)
    few, many = (level_audit(query, store, near=0, mass=mass) for mass in (0.5, 0.95))
    assert (few.opened < many.opened).all()
    assert many.divergence.mean() < few.divergence.mean()
    coarse = attention_rows(query, store, Opening(0, 0), 32**-0.5)
    rows = attention_rows(query, store, Opening(0, 0, 0.5), 32**-0.5)
    held = (coarse.weights.sum(2) * rows.opened).sum(-1)
    assert (held >= 0.5 * 2).all()
    least = torch.where(rows.opened & ~coarse.opened, coarse.weights.sum(2), torch.inf).amin(-1)
    assert (held - least < 0.5 * 2).all()


def test_opening_tokens_brings_a_row_closer():
    key, value = random_tokens(900)
    store, query = store_of(key, value), 2 * torch.randn(2, 4, 1, 32)
    audits = [level_audit(query, store, near=0, heavy=heavy) for heavy in (0, 64, 900)]
    none, some, everything = (audit.divergence.mean() for audit in audits)
    assert everything < 1e-6 < some < none
    assert audits[2].error.max() < 1e-5 < audits[1].error.mean() < audits[0].error.mean()
    assert audits[1].opened.unique().tolist() == [64 + 16 + 900 % 64]
    assert audits[1].seen.unique().tolist() == [900]


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_what_is_not_a_number_is_not_hidden(impl):
    key, value = random_tokens(200, heads=1)
    for broken in (torch.nan, torch.inf):
        bad = key.clone()
        bad[0, 0, 70, 3] = broken
        output = level_attention(torch.ones(2, 2, 1, 32), store_of(bad, value), impl=impl)
        assert torch.isnan(output[0]).all()
        assert torch.isfinite(output[1]).all()
    bad = value.clone()
    bad[0, 0, 70, 3] = torch.nan
    output = level_attention(torch.ones(2, 2, 1, 32), store_of(key, bad), impl=impl)
    assert torch.isnan(output[0]).any()


def test_tiny_scores_leave_all_tokens_alike():
    key, value = random_tokens(300)
    query = 1e-6 * torch.randn(2, 2, 1, 32)
    assert_native_equals_the_reference(query, store_of(key, value), Opening())


def test_huge_scores_stay_finite():
    key, value = random_tokens(300)
    store, query = store_of(key, value), 1e3 * torch.randn(2, 2, 1, 32)
    expected = level_attention(query, store, impl="reference")
    actual = level_attention(query, store, impl="native")
    assert torch.isfinite(actual).all()
    assert torch.allclose(actual, expected, atol=1e-2)


def test_the_operation_passes_the_checks_of_torch():
    key, value = random_tokens(200)
    store = store_of(key, value)
    arrays = [getattr(store, name) for name in op.ARRAYS]
    about = [4, 4, 0, 16, 32, 32, 200, 64, 8]
    query = torch.randn(2, 4, 2, 32)
    torch.library.opcheck(op._attend, (query, arrays, store.lengths, about, -1.0, 0.2))
    query = torch.randn(2, 4, 1, 32)
    torch.library.opcheck(op._attend, (query, arrays, store.lengths, about, 0.5, 0.2))


def test_attention_is_traced_for_a_compiled_graph():
    key, value = random_tokens(200)
    store, query = store_of(key, value), torch.randn(2, 4, 1, 32)
    compiled = torch.compile(lambda q: level_attention(q, store), backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(query), level_attention(query, store))


@pytest.mark.parametrize(
    ("query", "options", "error", "message"),
    [
        (torch.zeros(2, 2, 1, 8), {}, ValueError, "query must be"),
        (torch.zeros(2, 3, 1, 32), {}, ValueError, "multiple of the store's 2 heads"),
        (torch.zeros(2, 2, 1, 32), {"near": -1}, ValueError, "near must be"),
        (torch.zeros(2, 2, 1, 32), {"heavy": 1.5}, TypeError, "heavy must be"),
        (torch.zeros(2, 2, 1, 32), {"mass": 2.0}, ValueError, "mass must be"),
        (torch.zeros(2, 2, 1, 32), {"impl": "triton"}, ValueError, "impl must be"),
        (torch.zeros(2, 2, 1, 32, dtype=torch.float64), {"impl": "native"}, ValueError, "query"),
    ],
)
def test_wrong_arguments_are_refused(query, options, error, message):
    store = store_of(*random_tokens(5))
    with pytest.raises(error, match=message):
        level_attention(query, store, **options)


def test_the_kernel_has_no_gradients_and_says_so():
    store, query = store_of(*random_tokens(100)), torch.randn(2, 2, 1, 32, requires_grad=True)
    with pytest.raises(ValueError, match="no gradients"):
        level_attention(query, store, impl="native")
    level_attention(query, store).sum().backward()
    assert query.grad is not None


def test_a_store_in_float64_is_left_to_the_reference():
    key, value = (x.double() for x in random_tokens(100))
    with pytest.raises(ValueError, match="takes float32 and bfloat16"):
        store_of(key, value, impl="native")
    store = store_of(key, value)
    assert level_attention(torch.randn(2, 2, 1, 32).double(), store).dtype == torch.float64


def test_the_implementations_are_listed():
    found = [x.name for x in ps.implementations() if x.operation == "level_attention"]
    assert found == ["reference", "native"]
    assert LevelStore is ps.LevelStore
