"""An implementation asked for by name is the one that runs, on every path of the layer."""

from dataclasses import replace

import pytest
import torch

import polyscale as ps
from polyscale.layers.hkt_cache import HKTCache
from polyscale.ops.backends import Operation
from polyscale.ops.hkt.api import DECODE
from polyscale.ops.hkt.native.library import LIBRARY
from polyscale.ops.linear import onednn
from polyscale.ops.native.entry import Entry

NO_KERNEL = LIBRARY.why_not_built()


def refuse(*_):
    raise AssertionError("another implementation was asked for")


def replace_backend(monkeypatch, operation, name, **changes):
    changed = replace(operation._by_name[name], **changes)
    monkeypatch.setitem(operation._by_name, name, changed)


@pytest.fixture
def _nothing_native(monkeypatch):
    monkeypatch.setattr(Entry, "run", refuse)
    monkeypatch.setattr(onednn._Linear, "apply", refuse)


def feed(layer, x, pieces, padded=False):
    """The output of tokens fed piece by piece, with a padded prompt or without."""
    cache, outputs = HKTCache(), []
    for number, piece in enumerate(x.split(pieces, dim=1)):
        lengths = torch.tensor([piece.shape[1], piece.shape[1] - 1])
        options = {"lengths": lengths} if padded and not number else {}
        outputs.append(layer(piece, cache=cache, **options))
    return torch.cat(outputs, dim=1)


@pytest.mark.usefixtures("_nothing_native")
@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"shared_projections": False}])
@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_nothing_native_runs_where_another_implementation_is_named(impl, options):
    layer = ps.HKTAttention(16, 2, impl=impl, **options)
    x = torch.randn(2, 90, 16)
    layer(x).sum().backward()
    with torch.no_grad():
        layer(x)
        whole = layer(x[:, :80])
        assert torch.allclose(feed(layer, x[:, :80], [70, 1, 1, 8]), whole, atol=1e-5)
        feed(layer, x, [70, 1, 19], padded=True)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_decoding_asks_the_implementation_that_is_named(impl, monkeypatch):
    other = {"reference": "sdpa", "sdpa": "reference"}[impl]
    replace_backend(monkeypatch, DECODE, other, run=refuse)
    layer = ps.HKTAttention(16, 2, impl=impl, relative_positions=3)
    x = torch.randn(2, 9, 16)
    assert torch.allclose(feed(layer, x, [5, 1, 3]), layer(x), atol=1e-5)


@pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")
def test_native_decodes_or_says_why_not(monkeypatch):
    layer = ps.HKTAttention(16, 2, impl="native")
    x = torch.randn(2, 40, 16)
    for name in ("reference", "sdpa"):
        replace_backend(monkeypatch, DECODE, name, run=refuse)
    with torch.no_grad():
        assert torch.allclose(feed(layer, x, [10, 1, 29]), layer(x), atol=1e-5)
    with pytest.raises(ValueError, match=r"native.*cannot run hkt_decode.*no gradients.*no_grad"):
        feed(layer, x, [39, 1])


def test_a_cache_is_refused_by_an_implementation_that_cannot_decode():
    layer = ps.HKTAttention(16, 2, impl="triton")
    with pytest.raises(ValueError, match="got 'triton'; these compute hkt_decode"):
        layer(torch.randn(1, 4, 16), cache=HKTCache())


@pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")
def test_weights_that_learn_while_all_else_is_frozen_get_gradients_from_decoding():
    layer = ps.HKTAttention(16, 2).requires_grad_(False)
    layer.level_logits.requires_grad_()
    feed(layer, torch.randn(1, 9, 16), [8, 1])[:, -1].sum().backward()
    assert torch.count_nonzero(layer.level_logits.grad) > 0


@pytest.mark.parametrize("impl", ["auto", "native", "sdpa", "reference"])
def test_every_part_of_a_layer_asks_its_operation_which_implementation_runs(impl, monkeypatch):
    if impl == "native" and NO_KERNEL is not None:
        pytest.skip(f"no native kernel: {NO_KERNEL}")
    chosen = set()
    choose = Operation.choose

    def note(operation, asked, *arguments, **options):
        backend = choose(operation, asked, *arguments, **options)
        chosen.add((operation.name, backend.name))
        return backend

    monkeypatch.setattr(Operation, "choose", note)
    layer, cache = ps.HKTAttention(16, 2, impl=impl), HKTCache()
    layer(torch.randn(2, 90, 16)).sum().backward()
    with torch.no_grad():
        layer(torch.randn(1, 80, 16), cache=cache)
        layer(torch.randn(1, 1, 16), cache=cache)
    asked = {operation for operation, _ in chosen}
    assert {"hkt_attention", "hkt_decode", "linear", "downsample"} <= asked
    if impl in ("sdpa", "reference"):
        assert {backend for _, backend in chosen} <= {impl, "reference"}
        assert ("hkt_attention", impl) in chosen
        assert ("hkt_decode", impl) in chosen
