from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import polyscale as ps
from polyscale.inject.level_layer import LevelLayer
from tests.inject.models import llama, logits, text
from tests.inject.test_opened import ALL, DECODERS, GREEDY, SMALL, exactly

COARSE: dict[str, Any] = {"near": 8, "sinks": 2, "heavy": 8, "dense": 0}

# By the reference and by the native kernel; the logits are about 10.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}


def coarse(**changes: Any) -> PreTrainedModel:
    """Injected so that most tokens are read from the coarse level; prompts are dense."""
    model = llama(max_position_embeddings=400)
    return ps.inject_opened(model, cache={**COARSE, **changes})


def stepped(model: PreTrainedModel, ids: Tensor, prompt: int, sizes: list[int]) -> Tensor:
    """Logits of what follows a prompt, fed in pieces through one cache."""
    found, at = [], prompt
    with torch.no_grad():
        cache = model(ids[:, :prompt]).past_key_values
        assert isinstance(cache, ps.LevelCache)
        for size in sizes:
            found.append(model(ids[:, at : at + size], past_key_values=cache).logits)
            at += size
    return torch.cat(found, 1)


def test_a_model_in_bfloat16_decodes_as_exactly_as_its_dtype_allows() -> None:
    model, ids = llama(max_position_embeddings=400).bfloat16(), text(2, 150)
    expected = stepped_densely(model, ids, [120, 30]).float()
    ps.inject_opened(model, prompt=ALL, cache={"near": 200, "dense": 0})
    found = stepped(model, ids, 120, [1] * 30).float()
    off = (found - expected[:, 120:]).abs().mean() / expected.abs().mean()
    assert float(off) < 0.03


def stepped_densely(model: PreTrainedModel, ids: Tensor, sizes: list[int]) -> Tensor:
    """Logits of a text fed in pieces to a model that is not injected."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", DECODERS)
def test_generate_writes_as_the_original_if_everything_is_read_exactly(name: str) -> None:
    model = DECODERS[name]()
    expected = model.generate(text(2, 40), max_new_tokens=20, **GREEDY)
    exactly(model)
    output = model.generate(text(2, 40), max_new_tokens=20, return_dict_in_generate=True, **GREEDY)
    assert isinstance(output.past_key_values, ps.LevelCache)
    assert torch.equal(output.sequences, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_chunk_of_new_tokens_is_decoded_as_one_by_one(dtype: torch.dtype) -> None:
    model, ids = coarse().to(dtype), text(2, 200)
    one_by_one = stepped(model, ids, 150, [1] * 50)
    chunk = stepped(model, ids, 150, [50])
    size = TOLERANCE[dtype]
    torch.testing.assert_close(chunk, one_by_one, atol=size, rtol=size)
    exact = logits(ps.restore(model), input_ids=ids)[:, 150:]
    off = float((chunk - exact).abs().mean() / exact.abs().mean())
    assert 1e-4 < off < 0.3  # most tokens were read from few bits, and they did count


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_left_padded_rows_are_decoded_as_they_are_alone(dtype: torch.dtype) -> None:
    model = coarse().to(dtype)
    lengths, new = (170, 101, 66), 12
    texts = [text(1, length + new, seed=length)[0] for length in lengths]
    ids = torch.zeros(3, 170 + new, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(texts):
        ids[row, -len(one) :], mask[row, -len(one) :] = one, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = ps.LevelCache(model.config, **COARSE)
    found = []
    with torch.no_grad():
        for low, high in [(0, 170), *((at, at + 1) for at in range(170, 170 + new))]:
            output = model(
                ids[:, low:high],
                attention_mask=mask[:, :high],
                position_ids=positions[:, low:high],
                past_key_values=cache,
            )
            found.append(output.logits[:, -1])
    size = TOLERANCE[dtype]
    for row, one in enumerate(texts):
        alone = stepped(model, one[None], lengths[row], [1] * new)[0]
        torch.testing.assert_close(torch.stack(found[1:], 1)[row], alone, atol=size, rtol=size)


def test_new_tokens_that_end_in_padding_are_still_causal() -> None:
    """As in assisted generation where the assistant proposes the padding token."""
    model, ids = coarse(), text(1, 122)
    alone = stepped(model, ids, 120, [1])
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    with torch.no_grad():
        cache = model(ids[:, :120]).past_key_values
        found = model(ids[:, 120:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(found[:, :1], alone, atol=1e-5, rtol=1e-5)


def test_beam_search_writes_as_the_original_if_everything_is_read_exactly() -> None:
    model = llama()
    options = {**GREEDY, "max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2}
    expected = model.generate(text(2, 30), **options)
    assert torch.equal(exactly(model).generate(text(2, 30), **options), expected)


@pytest.mark.parametrize("assistant", ["model", "lookup"])
def test_assisted_generation_writes_what_plain_generation_writes(assistant: str) -> None:
    model = exactly(llama())
    expected = model.generate(text(1, 30), max_new_tokens=25, **GREEDY)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if assistant == "model":
        options = {"assistant_model": llama(num_hidden_layers=1)}
    found = model.generate(text(1, 30), max_new_tokens=25, **GREEDY, **options)
    assert torch.equal(found, expected)


def test_prompts_in_parts_at_block_boundaries_are_read_as_in_one() -> None:
    model = ps.inject_opened(llama(), prompt=SMALL, cache={**COARSE, "at_once": 4})
    ids = text(2, 90)
    whole = logits(model, input_ids=ids)
    with torch.no_grad():
        cache = ps.LevelCache(model.config, **COARSE)
        parts = [
            model(ids[:, low:high], past_key_values=cache).logits
            for low, high in [(0, 40), (40, 56), (56, 90)]
        ]
    # The last row of a prompt always chooses too, so a part chooses with one row more.
    difference = (torch.cat(parts, 1) - whole).abs().amax((0, 2))
    assert float(difference.mean()) < 0.05 * float(whole.abs().mean())
    assert cache.get_seq_length() == 90
    ps.inject_opened(ps.restore(model), prompt=ALL, cache={"at_once": 4})
    with torch.no_grad():
        cache = ps.LevelCache(model.config)
        parts = [model(part, past_key_values=cache).logits for part in ids.split(30, 1)]
    exact = logits(ps.restore(model), input_ids=ids)
    torch.testing.assert_close(torch.cat(parts, 1), exact, atol=1e-6, rtol=1e-6)


def test_generation_goes_on_from_the_cache_it_returned() -> None:
    model = coarse()
    whole = model.generate(text(1, 120), max_new_tokens=30, **GREEDY)
    first = model.generate(text(1, 120), max_new_tokens=10, return_dict_in_generate=True, **GREEDY)
    rest = model.generate(
        first.sequences, past_key_values=first.past_key_values, max_new_tokens=20, **GREEDY
    )
    assert torch.equal(rest, whole)


@pytest.mark.parametrize("dense", [0, 120, 1000])
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_come(dense: int) -> None:
    model, ids = coarse(dense=dense), text(2, 160)
    with torch.no_grad():
        cache = model(ids[:, :100]).past_key_values
        expected = model(ids[:, 100:110], past_key_values=cache).logits
        model(ids[:, 110:140], past_key_values=cache)
        cache.crop(-40)
        assert cache.get_seq_length() == 100
        again = model(ids[:, 100:110], past_key_values=cache).logits
    if dense == 120:  # whole keys have moved into levels, and stay there
        assert not torch.equal(again, expected)
    else:
        torch.testing.assert_close(again, expected, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="must be negative"):
        cache.crop(5)


@pytest.mark.parametrize("dense", [0, 1000])
def test_rows_are_reordered_repeated_selected_and_forgotten(dense: int) -> None:
    model, ids = coarse(dense=dense), text(3, 101)
    with torch.no_grad():
        full = stepped(model, ids, 100, [1])

        def after(change: Any, rows: list[int]) -> None:
            cache = model(ids[:, :100]).past_key_values
            change(cache)
            found = model(ids[rows, 100:], past_key_values=cache).logits
            torch.testing.assert_close(found, full[rows], atol=1e-6, rtol=1e-6)

        after(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0])
        after(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])
        after(lambda cache: cache.batch_select_indices(torch.tensor([1])), [1])
        cache = model(ids[:, :100]).past_key_values
        cache.reset()
        assert cache.get_seq_length() == 0
        model(ids[:, :100], past_key_values=cache)
        found = model(ids[:, 100:], past_key_values=cache).logits
        torch.testing.assert_close(found, full, atol=1e-6, rtol=1e-6)


def test_short_caches_are_whole_and_decoded_bit_for_bit_as_by_the_original() -> None:
    model, ids = llama(), text(2, 60)
    expected = stepped_densely(model, ids, [50, 1, 9])
    ps.inject_opened(model)
    cache = ps.LevelCache(model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([50, 1, 9], 1)]
    assert all(isinstance(layer, LevelLayer) and layer.is_whole for layer in cache.layers)
    assert torch.equal(torch.cat(parts, 1), expected)
    report = cache.report()
    assert report["bytes_read_per_token"] == report["dense_bytes_per_token"]


def test_whole_keys_move_into_levels_when_they_become_many_padding_and_all() -> None:
    model = llama()
    ids, mask = text(2, 90), torch.ones(2, 90, dtype=torch.long)
    ids[1, :17], mask[1, :17] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = logits(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    ps.inject_opened(model, cache={"near": 200, "dense": 80})
    cache, found = ps.LevelCache(model.config, near=200, dense=80), []
    with torch.no_grad():
        for low, high in [(0, 70), (70, 75), *((at, at + 1) for at in range(75, 90))]:
            output = model(
                ids[:, low:high],
                attention_mask=mask[:, :high],
                position_ids=positions[:, low:high],
                past_key_values=cache,
            )
            found.append(output.logits)
    layer = cache.layers[0]
    assert isinstance(layer, LevelLayer)
    assert layer.store is not None
    assert layer.store.lengths.tolist() == [90, 73]
    real = mask.bool()
    torch.testing.assert_close(torch.cat(found, 1)[real], expected[real], atol=1e-6, rtol=1e-6)


def test_an_ordinary_cache_of_the_users_is_decoded_densely() -> None:
    model, ids = llama(), text(1, 60)
    expected = logits(model, input_ids=ids)
    ps.inject_opened(model, cache=COARSE)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([50, 1, 9], 1)]
    assert type(cache) is DynamicCache
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-9, rtol=1e-9)
    options = {**GREEDY, "max_new_tokens": 9}
    found = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    also = model.generate(ids, cache_implementation="dynamic", **options)
    expected = ps.restore(model).generate(ids, **options)
    assert torch.equal(found, expected)
    assert torch.equal(also, expected)


def test_a_level_cache_for_a_model_that_is_not_injected_raises_with_what_to_do() -> None:
    model = llama()
    with pytest.raises(ValueError, match=r"call polyscale.inject_opened\(model\) first"):
        model(text(1, 9), past_key_values=ps.LevelCache(model.config))
    with pytest.raises(ValueError, match=r"call polyscale.inject_opened\(model\) first"):
        model.generate(text(1, 9), past_key_values=ps.LevelCache(model.config))
    cache = coarse()(text(1, 70)).past_key_values
    with pytest.raises(ValueError, match=r"call polyscale.inject_opened\(model\) first"):
        model(text(1, 1), past_key_values=cache)


def test_a_dense_cache_becomes_one_with_levels() -> None:
    model, ids = llama(max_position_embeddings=400), text(2, 150)
    dense = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :120], past_key_values=dense)
        ps.inject_opened(model, cache=COARSE)
        cache = ps.LevelCache.from_cache(dense, model.config, **COARSE)
        found = model(ids[:, 120:], past_key_values=cache).logits
    expected = stepped(model, ids, 120, [30])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert dense.get_seq_length() == 120


@pytest.mark.parametrize("dense", [0, 1000])
def test_a_saved_cache_goes_on_where_it_was(tmp_path: Path, dense: int) -> None:
    model, ids = coarse(bits=(4, 2), dense=dense), text(2, 130)
    with torch.no_grad():
        cache = model(ids[:, :120]).past_key_values
        cache.save(tmp_path / "prompt.safetensors")
        again = ps.LevelCache.load(tmp_path / "prompt.safetensors", model.config)
        assert again.get_seq_length() == 120
        expected = model(ids[:, 120:], past_key_values=cache).logits
        found = model(ids[:, 120:], past_key_values=again).logits
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="layers"):
        ps.LevelCache.load(tmp_path / "prompt.safetensors", llama(num_hidden_layers=2).config)


@pytest.mark.parametrize("dense", [0, 1000])
def test_a_damaged_file_of_a_cache_is_refused_with_its_name(tmp_path: Path, dense: int) -> None:
    model, path = coarse(dense=dense), tmp_path / "prompt.safetensors"
    cache = model(text(2, 120)).past_key_values
    whole = cache.save(path).read_bytes()
    for left in (4, 300, len(whole) - 100):
        path.write_bytes(whole[:left])
        with pytest.raises(
            ValueError, match=r"whole file that LevelCache.save wrote, got .*prompt"
        ):
            ps.LevelCache.load(path, model.config)
    with safe_open(cache.save(path), "pt") as file:
        about, names = file.metadata(), file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
    lost = next(name for name in names if name.startswith("1."))
    save_file({name: x for name, x in tensors.items() if name != lost}, path, about)
    with pytest.raises(ValueError, match="layer 1 is damaged"):
        ps.LevelCache.load(path, model.config)
    save_file(
        tensors, path, {"polyscale": about["polyscale"].replace('"version": 2', '"version": 1')}
    )
    with pytest.raises(ValueError, match="of version 1 where this one reads 2"):
        ps.LevelCache.load(path, model.config)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="must be a whole file"):
        ps.LevelCache.load(path, model.config)
    with pytest.raises(FileNotFoundError):
        ps.LevelCache.load(tmp_path / "none.safetensors", model.config)


def test_the_report_counts_bytes_held_and_read_and_what_was_opened() -> None:
    model, ids = coarse(), text(1, 330)
    with torch.no_grad():
        cache = model(ids[:, :320]).past_key_values
        empty = cache.report()
        assert empty["decoded"] == 0
        model(ids[:, 320:], past_key_values=cache)
    report = cache.report()
    assert report["tokens"] == 330
    assert report["decoded"] == 10
    assert 0 < report["share_opened"] < 0.2
    assert report["bytes_read_per_token"] < 0.5 * report["dense_bytes_per_token"]
    assert report["bytes_held"] > report["dense_bytes_per_token"]  # exact keys and coarse ones
    assert report["audit"] is None


def test_what_a_share_of_the_mass_opens_is_counted_where_it_is_audited_or_said_to_be_unknown() -> (
    None
):
    ids, reports = text(1, 330), {}
    for mass, every in ((0.0, 1), (1.0, 1), (1.0, 0)):
        model = coarse(mass=mass, audit_every=every, near=64, sinks=16)
        with torch.no_grad():
            cache = model(ids[:, :320]).past_key_values
            assert "no token" in cache.report()["share_opened_why"]
            model(ids[:, 320:], past_key_values=cache)
        reports[mass, every] = cache.report()
    few, all_of_them, unknown = reports.values()
    # Nothing heavy: the first 16 tokens and the newest 64, of 321 to 330.
    assert few["share_opened"] == pytest.approx(80 / 325.5)
    assert all_of_them["share_opened"] > 0.99
    assert all_of_them["share_opened_why"] is None
    assert few["bytes_read_per_token"] < all_of_them["bytes_read_per_token"]
    assert unknown["share_opened"] is None
    assert unknown["bytes_read_per_token"] is None
    assert "mass=1.0" in unknown["share_opened_why"]
    assert "audit_every" in unknown["share_opened_why"]


def test_every_so_manieth_token_is_audited() -> None:
    model, ids = coarse(audit_every=4), text(1, 160)
    with torch.no_grad():
        cache = model(ids[:, :140]).past_key_values
        for at in range(140, 160):
            model(ids[:, at : at + 1], past_key_values=cache)
    audit = cache.report()["audit"]
    assert audit["rows"] == 5
    assert 0 < audit["kl"] < 1
    assert 0 < audit["output_error"] < 1
    assert all(isinstance(layer, LevelLayer) for layer in cache.layers)
