"""The reference against the definition in loops, and against softmax attention."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import polyscale as ps
from tests.ops.opened.cases import (
    DEFAULTS,
    in_loops,
    padding_of,
    places_of,
    random_case,
    settings_of,
)

SMALL = {"block": 16, "key_block": 4, "near": 8, "heavy": 8, "sample": 4}
VARIANTS = [
    {},
    {"mass": 0.8},
    {"near": 5},
    {"near": 5, "mass": 0.7},
    {"near": 0, "heavy": 0},
    {"sample": 16, "heavy": 16},
    {"sample": 1},
    {"causal": False},
    {"causal": False, "mass": 0.8, "near": 3},
    {"strict": True},
    {"strict": True, "near": 3, "mass": 0.6},
    {"strict": True, "sample": 2, "key_block": 8},
]


@pytest.mark.parametrize("sinks", [4, 3, [0, 9, 21]], ids=str)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_reference_is_the_definition(options, sinks):
    torch.manual_seed(0)
    options = {**DEFAULTS, **SMALL, **options}
    tensors = [x.detach() for x in random_case(53, batch=1, width=4, value_width=3)]
    output, audit = ps.opened_attention(
        *tensors, sinks=sinks, impl="reference", return_audit=True, **options
    )
    first = range(sinks) if isinstance(sinks, int) else sinks
    expected = in_loops(*(x[0] for x in tensors), settings_of(4, **options), set(first))
    torch.testing.assert_close(output[0], expected.output, atol=1e-12, rtol=1e-12)
    opened = [[set(row.nonzero()[:, 0].tolist()) for row in head] for head in audit.opened[0]]
    assert opened == expected.opened
    assert torch.equal(audit.mask()[0], expected.seen)
    assert audit.rows[0].tolist() == list(expected.kept)
    kept = torch.tensor(list(expected.kept.values()), dtype=torch.float64).T
    torch.testing.assert_close(audit.kept[0], kept, atol=1e-12, rtol=1e-12)
    pairs = 53 * 54 / 2 if options["causal"] else 53 * 53
    assert audit.share == pytest.approx(expected.seen.sum().item() / (4 * pairs), abs=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_one_mean_per_key_block_keeps_the_rest(causal):
    torch.manual_seed(0)
    query, key, value = (x.detach() for x in random_case(53, batch=1, width=4, value_width=3))
    options = {**DEFAULTS, **SMALL, "causal": causal, "near": 5}
    output, audit = ps.opened_attention(
        query, key, value, sinks=3, rest="pool", return_audit=True, **_without_rest(options)
    )
    seen = audit.mask()[0]
    for h in range(4):
        for i in range(53):
            keys, values, logs = [], [], []
            for block in range(14):
                members = range(block * 4, min(block * 4 + 4, 53))
                unseen = [j for j in members if not seen[h, i, j]]
                if causal and block * 4 + 4 > i // 16 * 16:
                    unseen = []
                for group in [[j] for j in members if seen[h, i, j]] + [unseen] * bool(unseen):
                    keys.append(key[0, h // 2, group].mean(0))
                    values.append(value[0, h // 2, group].mean(0))
                    logs.append(torch.tensor(float(len(group))).double().log())
            logits = torch.stack(keys) @ query[0, h, i] * 4**-0.5 + torch.stack(logs)
            expected = torch.softmax(logits, 0) @ torch.stack(values)
            torch.testing.assert_close(output[0, h, i], expected, atol=1e-12, rtol=1e-12)


def _without_rest(options):
    return {name: value for name, value in options.items() if name != "rest"}


@pytest.mark.parametrize("rest", ["drop", "pool"])
@pytest.mark.parametrize("causal", [True, False])
def test_kept_and_kl_are_those_of_dense_softmax(causal, rest):
    torch.manual_seed(0)
    query, key, value = (x.detach() for x in random_case(120))
    _, audit = ps.opened_attention(
        query, key, value, causal=causal, heavy=16, near=16, rest=rest, return_audit=True
    )
    allowed = torch.ones(120, 120, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    scores = (query @ key.repeat_interleave(2, 1).mT / 4).masked_fill(~allowed, -torch.inf)
    softmax = scores.softmax(-1)[:, :, audit.rows[0]]
    seen = audit.mask()[:, :, audit.rows[0]]
    torch.testing.assert_close(audit.kept, (softmax * seen).sum(-1))
    assert (audit.kept < 1 - 1e-3).any()
    # The row itself: attention to the rows of the identity matrix.
    identity = torch.eye(120, dtype=torch.float64).expand(2, 2, 120, 120)
    row = ps.opened_attention(query, key, identity, causal=causal, heavy=16, near=16, rest=rest)
    row = row[:, :, audit.rows[0]]
    logs = torch.where(row > 0, row / softmax.clamp(min=1e-300), 1.0).log()
    torch.testing.assert_close(audit.kl, (row * logs).sum(-1), atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("impl", ["reference", "native"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 15, 64, 257])
def test_with_everything_opened_it_is_softmax_attention(length, causal, impl):
    torch.manual_seed(0)
    tensors = random_case(length, width=64, value_width=64, dtype=torch.float32)
    # In double: in float32 SDPA itself is off by up to 2e-6.
    exact = [x.detach().double().requires_grad_() for x in tensors]
    wide = [exact[0], *(x.repeat_interleave(2, 1) for x in exact[1:])]
    output, audit = ps.opened_attention(
        *tensors, causal=causal, heavy=1024, impl=impl, return_audit=True
    )
    expected = F.scaled_dot_product_attention(*wide, is_causal=causal)
    assert (output - expected).abs().max() <= 1e-6
    assert audit.share == 1
    assert audit.kl.max() <= 1e-6
    cotangent = torch.randn_like(output)
    for ours, theirs in zip(
        torch.autograd.grad(output, tensors, cotangent),
        torch.autograd.grad(expected, exact, cotangent.double()),
        strict=True,
    ):
        assert (ours - theirs).abs().max() <= 1e-5


def test_a_share_of_mass_is_kept_by_as_few_blocks_as_it_takes():
    torch.manual_seed(0)
    query, key, value = random_case(400, batch=1, heads=2, key_heads=2)
    found = {}
    for mass in (0.5, 0.8, 0.95, 1.0):
        _, audit = ps.opened_attention(
            query, key, value, mass=mass, near=16, sinks=4, return_audit=True
        )
        kept = audit.kept[..., :48].unflatten(-1, (-1, 8)).mean(-1)  # of each whole query block
        assert (kept >= mass - 1e-12).all()
        found[mass] = audit.opened.sum().item()
    assert found[0.5] < found[0.8] < found[0.95] < found[1.0]


@pytest.mark.parametrize("options", [{}, {"rest": "pool"}, {"mass": 0.9}, {"causal": False}])
@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_padding_changes_nothing(side, options):
    torch.manual_seed(0)
    tensors = [x.detach() for x in random_case(180)]
    mask = padding_of(side, 180)
    output, audit = ps.opened_attention(
        *tensors, key_padding_mask=mask, heavy=32, near=16, return_audit=True, **options
    )
    assert (output.transpose(1, 2)[mask] == 0).all()
    for row in range(2):
        real = ~mask[row]
        alone, mine = ps.opened_attention(
            *(x[row : row + 1, :, real] for x in tensors),
            heavy=32,
            near=16,
            return_audit=True,
            **options,
        )
        torch.testing.assert_close(output[row : row + 1, :, real], alone, atol=1e-12, rtol=1e-12)
        rows = mine.rows.shape[1]
        assert torch.equal(audit.rows[row, :rows], mine.rows[0])
        assert (audit.rows[row, rows:] == -1).all()
        torch.testing.assert_close(audit.kept[row, :, :rows], mine.kept[0])
        blocks, key_blocks = mine.opened.shape[2:]
        assert torch.equal(audit.opened[row, :, :blocks, :key_blocks], mine.opened[0])
        assert not audit.opened[row, :, blocks:].any()


@pytest.mark.parametrize("options", [{}, {"rest": "pool"}, {"strict": True}, {"causal": False}])
def test_packed_sequences_do_not_see_each_other(options):
    torch.manual_seed(0)
    bounds = torch.tensor([0, 100, 107, 171, 250])
    tensors = [x.detach() for x in random_case(250, batch=1)]
    common = {"heavy": 32, "near": 16, **options}
    output, audit = ps.opened_attention(*tensors, cu_seqlens=bounds, return_audit=True, **common)
    mask = audit.mask()
    for begin, end in pairwise(bounds.tolist()):
        part = slice(begin, end)
        alone, mine = ps.opened_attention(
            *(x[:, :, part] for x in tensors), return_audit=True, **common
        )
        torch.testing.assert_close(output[:, :, part], alone, atol=1e-12, rtol=1e-12)
        assert torch.equal(mask[:, :, part, part], mine.mask())
        mask[:, :, part, part] = False
    assert not mask.any()


@pytest.mark.parametrize("options", [{}, {"mass": 0.9}, {"rest": "pool"}])
def test_a_prompt_in_parts_that_start_at_blocks_is_the_whole_prompt(options):
    torch.manual_seed(0)
    query, key, value = (x.detach() for x in random_case(250))
    whole = ps.opened_attention(query, key, value, heavy=32, near=16, **options)
    parts = [
        ps.opened_attention(
            query[:, :, begin:end], key[:, :, :end], value[:, :, :end], heavy=32, near=16, **options
        )
        for begin, end in ((0, 64), (64, 192), (192, 250))
    ]
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-12, rtol=1e-12)


def test_the_last_position_is_always_sampled():
    torch.manual_seed(0)
    tensors = random_case(1, 300)
    _, audit = ps.opened_attention(*tensors, return_audit=True)
    assert audit.rows.tolist() == [[299], [299]]
    _, audit = ps.opened_attention(*random_case(30, 300), return_audit=True)
    assert audit.rows[0].tolist() == [271, 279, 287, 295, 299]


def test_padded_rows_may_have_later_parts_too():
    torch.manual_seed(0)
    query, key, value = (x.detach() for x in random_case(90, 200))
    mask = padding_of("left", 200)
    output = ps.opened_attention(query, key, value, key_padding_mask=mask, heavy=32, near=16)
    for row in range(2):
        real = ~mask[row]
        alone = ps.opened_attention(
            query[row : row + 1, :, real[110:]],
            key[row : row + 1, :, real],
            value[row : row + 1, :, real],
            heavy=32,
            near=16,
        )
        torch.testing.assert_close(
            output[row : row + 1, :, real[110:]], alone, atol=1e-12, rtol=1e-12
        )


def test_sinks_may_differ_by_row():
    torch.manual_seed(0)
    tensors = [x.detach() for x in random_case(150, batch=2)]
    sinks = torch.tensor([[0, 70, -1], [3, 9, 41]])
    _, audit = ps.opened_attention(*tensors, sinks=sinks, heavy=0, near=0, return_audit=True)
    seen = audit.mask()[:, 0, -1, :128]
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[0, 70], [3, 9, 41]]
    places = places_of(*tensors[:2], sinks=[2])
    assert places.sinks.nonzero().tolist() == [[0, 2], [1, 2]]
