from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyscale as ps
from polyscale.inject import OpenedAudit
from tests.inject.models import bert, llama, logits, text

SMALL: dict[str, Any] = {
    "block": 8, "key_block": 4, "near": 4, "sinks": 2, "heavy": 8, "sample": 4, "dense": 0
}  # fmt: skip
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


def attention_of(model: Any, ids: Tensor) -> list[Tensor]:
    """The softmax weights `[B, H, N, N]` of each layer."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation("sdpa")
    return list(found)


def test_the_audit_of_the_first_layer_is_the_softmax_mass_that_its_view_leaves_out() -> None:
    torch.manual_seed(0)
    model, ids = llama(num_hidden_layers=1), text(2, 70)
    weights = attention_of(model, ids)[0]
    ps.inject_opened(model, prompt=SMALL)
    with ps.opened_audit(model) as audit:
        logits(model, input_ids=ids)
    kept, kl = [], []
    choice: list[Any] = []
    record = model.model.layers[0].self_attn._polyscale_opened
    record.listener = choice.append
    logits(model, input_ids=ids)
    record.listener = None
    seen = choice[0].audit.mask()  # [B, H, N, N]
    rows = choice[0].audit.rows[0]
    mass = (weights * seen).sum(-1)[:, :, rows]  # [B, H, R]
    kept, kl = mass.mean((0, 2)), -mass.log()
    (one,) = audit.layers
    assert one.rows == 2 * len(rows)
    torch.testing.assert_close(one.kept / one.rows, kept, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(one.kl / one.rows, kl.mean((0, 2)), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(one.worst, kl.amax((0, 2)), atol=1e-6, rtol=1e-6)
    share = float(seen.sum()) / (2 * 4 * 70 * 71 / 2)
    assert one.share == pytest.approx(share)
    assert 0 < share < 1


def test_several_calls_add_up_and_short_ones_count_as_dense() -> None:
    torch.manual_seed(0)
    model = ps.inject_opened(llama(), prompt={**SMALL, "dense": 30})
    with ps.opened_audit(model) as first:
        logits(model, input_ids=text(1, 70))
    with ps.opened_audit(model) as second:
        logits(model, input_ids=text(1, 50, seed=1))
    with ps.opened_audit(model) as both:
        logits(model, input_ids=text(1, 70))
        logits(model, input_ids=text(1, 50, seed=1))
        logits(model, input_ids=text(1, 30))
    assert (both.opened, both.dense) == (2, 1)
    for one, two, sums in zip(first.layers, second.layers, both.layers, strict=True):
        assert sums.rows == one.rows + two.rows
        torch.testing.assert_close(sums.kl, one.kl + two.kl)
        torch.testing.assert_close(sums.worst, torch.maximum(one.worst, two.worst))
        assert sums.pairs == pytest.approx(one.pairs + two.pairs + 30 * 31 / 2)
    total = both.total
    assert total["kl"] == pytest.approx(sum(one.mean_kl for one in both.layers) / 3)
    assert total["worst_kl"] == max(one.worst_kl for one in both.layers)
    assert total["decoded_kl"] is None


def test_decoding_is_audited_with_what_it_reads() -> None:
    torch.manual_seed(0)
    model = llama()
    cache: dict[str, Any] = {"near": 4, "heavy": 4, "sinks": 2, "bits": (4, 2), "dense": 0}
    ps.inject_opened(model, prompt=SMALL, cache=cache)
    with ps.opened_audit(model, every=2) as audit:
        model.generate(text(1, 90), max_new_tokens=9, **GREEDY)
    own = ps.LevelCache(model.config, audit_every=2, **cache)
    model.generate(text(1, 90), past_key_values=own, max_new_tokens=9, **GREEDY)
    report = own.report()
    for one, kl in zip(audit.layers, report["audit"]["by_layer"], strict=True):
        assert one.decoded_kl == pytest.approx(kl)
        assert one.decoded_kl > 0
    assert audit.total["bytes_read"] == report["bytes_read_per_token"]
    assert audit.total["dense_bytes"] == report["dense_bytes_per_token"]
    with ps.opened_audit(model, every=0) as silent:
        model.generate(text(1, 90), max_new_tokens=9, **GREEDY)
    assert silent.total["decoded_kl"] is None
    assert silent.total["bytes_read"] == report["bytes_read_per_token"]


def test_an_audited_model_says_what_it_says_without() -> None:
    torch.manual_seed(0)
    model = ps.inject_opened(llama(), prompt=SMALL, cache={"dense": 0})
    expected = model.generate(text(2, 60), max_new_tokens=8, **GREEDY)
    with ps.opened_audit(model):
        found = model.generate(text(2, 60), max_new_tokens=8, **GREEDY)
    assert torch.equal(found, expected)
    with ps.opened_audit(model) as audit:
        pass
    assert audit.total["rows"] == 0
    assert "0 texts opened" in str(audit)


def test_an_audit_is_printed_drawn_and_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ps.inject_opened(llama(), [0, 2], prompt=SMALL, cache={"dense": 0})
    with ps.opened_audit(model, every=3) as audit:
        model.generate(text(1, 90), max_new_tokens=8, **GREEDY)
    lines = str(audit).splitlines()
    assert lines[0].startswith("1 texts opened, 0 read densely")
    assert [line.split()[0] for line in lines[2:]] == ["layer", "0", "2", "all"]
    assert "MiB" in lines[-1]
    data = json.loads(json.dumps(audit.as_dict()))
    assert [one["layer"] for one in data["layers"]] == [0, 2]
    assert len(data["layers"][0]["kl_of_heads"]) == 4
    for suffix in ("png", "svg"):
        path = audit.figure(tmp_path / f"audit.{suffix}")
        assert path.stat().st_size > 1000
    with pytest.raises(ValueError, match=r"path must end in \.png, \.svg or \.pdf"):
        audit.figure(tmp_path / "audit.txt")
    with pytest.raises(ValueError, match="audit must have a text that was opened"):
        OpenedAudit([0], 8).figure(tmp_path / "audit.png")


def test_encoders_and_padded_texts_are_audited_too() -> None:
    torch.manual_seed(0)
    model = ps.inject_opened(bert(), prompt={**SMALL, "sinks": (0, -1), "rest": "drop"})
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, 50:] = 0
    with ps.opened_audit(model) as audit:
        logits(model, input_ids=text(2, 80), attention_mask=mask)
    assert all(0 < one.mean_kept < 1 and one.mean_kl > 0 for one in audit.layers)
    with ps.opened_audit(model) as alone:
        logits(model, input_ids=text(2, 80)[1:, :50])
    with ps.opened_audit(model) as other:
        logits(model, input_ids=text(2, 80)[:1])
    for both, one, two in zip(audit.layers, alone.layers, other.layers, strict=True):
        assert both.rows == one.rows + two.rows
        torch.testing.assert_close(both.kl, one.kl + two.kl, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_audited_is_refused() -> None:
    match = "must have layers with opened attention to be audited"
    with pytest.raises(ValueError, match=match), ps.opened_audit(llama()):
        pass
    model = ps.inject_opened(llama(), prompt=SMALL)
    match = r"every must .*got -1; 0 is never"
    with pytest.raises(ValueError, match=match), ps.opened_audit(model, every=-1):
        pass
    match = "must not be audited already"
    with (
        ps.opened_audit(model),
        pytest.raises(ValueError, match=match),
        ps.opened_audit(model),
    ):
        pass
    with pytest.raises(RuntimeError, match="on purpose"), ps.opened_audit(model):
        raise RuntimeError("on purpose")
    assert set(vars(ps.restore(model))) == set(vars(llama()))
