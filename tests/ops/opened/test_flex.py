"""The choice as a block mask, and torch's compiled flex_attention with it."""

import pytest
import torch

import polyscale as ps
from polyscale.ops.opened import selection
from polyscale.ops.opened.flex import block_mask
from polyscale.ops.opened.reference import choose
from polyscale.ops.opened.selection import choose_in_parts
from tests.ops.opened.cases import padding_of, places_of, random_case, settings_of


@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"mass": 0.9}, {"strict": True}], ids=str
)
@pytest.mark.parametrize("queries", [300, 170])
def test_a_choice_in_parts_is_the_choice(queries, options, monkeypatch):
    monkeypatch.setattr(selection, "QUERIES_AT_ONCE", 64)
    torch.manual_seed(0)
    query, key, _ = (x.detach() for x in random_case(queries, 300))
    places, chosen = places_of(query, key), settings_of(**options)
    if not chosen.causal:
        monkeypatch.setattr(selection, "QUERIES_AT_ONCE", 512)
    found, expected = (f(query, key, places, chosen) for f in (choose_in_parts, choose))
    assert torch.equal(found.opened, expected.opened)
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.columns, expected.columns)
    torch.testing.assert_close(found.kept, expected.kept)
    torch.testing.assert_close(found.kl, expected.kl)


@pytest.mark.parametrize("layout", ["plain", "padded", "packed", "later part"])
def test_the_block_mask_is_the_view(layout):
    torch.manual_seed(0)
    queries = 150 if layout == "later part" else 300
    batch = 1 if layout == "packed" else 2
    query, key, value = (x.detach() for x in random_case(queries, 300, batch=batch))
    given = {}
    if layout == "padded":
        given["key_padding_mask"] = padding_of("left", 300)
    if layout == "packed":
        given["cu_seqlens"] = torch.tensor([0, 100, 300])
    _, audit = ps.opened_attention(query, key, value, heavy=32, return_audit=True, **given)
    mask = block_mask(audit.opened, 4, audit.places, audit.settings)
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in (batch, 4, queries, 300)), indexing="ij")
    pairs = mask.mask_mod(b, h, q, k)
    assert torch.equal(pairs, audit.mask())
    tiles = mask.to_dense().bool()
    rows, columns = tiles.shape[2:]
    wide = torch.nn.functional.pad(pairs, (0, columns * 128 - 300, 0, rows * 128 - queries))
    assert torch.equal(wide.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).any(5).any(3), tiles)


def test_compiled_flex_attention_computes_the_same():
    torch.manual_seed(0)
    tensors = [x.detach() for x in random_case(300, width=16, value_width=16, dtype=torch.float32)]
    output, audit = ps.opened_attention(*tensors, heavy=32, impl="flex", return_audit=True)
    expected, other = ps.opened_attention(*tensors, heavy=32, impl="reference", return_audit=True)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(audit.opened, other.opened)


def test_what_flex_attention_does_not_take_is_refused():
    tensors = random_case(100, dtype=torch.float32)
    with pytest.raises(ValueError, match="flex_attention has no backward pass on the CPU"):
        ps.opened_attention(*tensors, impl="flex")
    with pytest.raises(ValueError, match="it drops the rest, got rest='pool'"):
        ps.opened_attention(*(x.detach() for x in tensors), impl="flex", rest="pool")
