"""The store: the bits it makes, and that they do not depend on how its tokens came."""

import copy

import pytest
import torch

from polyscale.ops.levels import LevelSettings, LevelStore, level_attention
from polyscale.ops.levels.blocks import coarse_level, exact_level
from polyscale.ops.levels.packing import (
    pack_keys,
    pack_rest,
    pack_values,
    quantize,
    quantize_symmetric,
    round_down,
    round_up,
    unpack_keys,
    unpack_rest,
    unpack_values,
)
from tests.ops.levels.cases import (
    NAMES,
    SETTINGS,
    coarse_by_loops,
    random_tokens,
    same_bits,
    store_of,
)


def test_codes_come_back_from_their_bytes():
    codes = torch.randint(0, 16, (3, 64, 32)).float()
    assert torch.equal(unpack_keys(pack_keys(codes)), codes)
    assert torch.equal(unpack_values(pack_values(codes, 4), 4), codes)
    assert torch.equal(unpack_rest(pack_rest(codes - 8)), codes - 8)
    codes = torch.randint(0, 4, (3, 64, 48)).float()
    assert torch.equal(unpack_values(pack_values(codes, 2), 2), codes)


def test_scales_are_rounded_outwards():
    x = torch.cat((torch.randn(1000) * 10.0 ** torch.randint(-9, 5, (1000,)), torch.zeros(1)))
    down, up = round_down(x).double(), round_up(x).double()
    assert (down <= x.double()).all()
    assert (up >= x.double()).all()
    near = x.half().double()
    assert ((down == near) | (up == near)).all()
    assert round_down(torch.tensor([1e9, -1e9])).tolist() == [65504.0, -65504.0]


def test_ties_go_to_the_even_code():
    _, step, codes, _ = quantize(torch.tensor([[0.0, 0.5, 1.5, 2.5, 15.0]]), 15, -1)
    assert (step.item(), codes.tolist()) == (1.0, [[0.0, 0.0, 2.0, 2.0, 15.0]])


def test_keys_are_rounded_by_channel_as_plain_loops_do_it():
    key, value = random_tokens(64, batch=1, heads=1, width=16)
    key[0, 0, :16] *= 100  # the first tokens need not fit into the scales
    store = store_of(key, value)
    expected = coarse_by_loops(key[0, 0].double(), sinks=16)
    assert torch.allclose(coarse_level(store, torch.float64)[0][0, 0], expected, atol=1e-12)
    seen = key[0, 0, 16:].double()
    assert (expected[16:] - seen).abs().max() < 0.51 * (seen.amax(0) - seen.amin(0)).max() / 15


def test_values_at_4_bits_are_off_by_half_a_seventh_of_the_largest():
    key, value = random_tokens(128)
    off = coarse_level(store_of(key, value), torch.float64)[1] - value.double()
    assert (off.abs() <= 0.501 / 7 * value.double().abs().amax(-1, keepdim=True)).all()


def test_values_at_2_bits_are_off_by_half_a_third_of_the_range_of_32_channels():
    key, value = random_tokens(128, value_width=80)
    store = store_of(key, value, LevelSettings((4, 2)))
    off = (coarse_level(store, torch.float64)[1] - value.double()).abs()
    for part, wrong in zip(value.double().split(32, -1), off.split(32, -1), strict=True):
        spread = part.amax(-1, keepdim=True) - part.amin(-1, keepdim=True)
        assert (wrong <= 0.501 / 3 * spread + 2e-3).all()


def test_bytes_are_16_times_as_fine_as_codes():
    key, value = random_tokens(192)
    store = store_of(key, value, LevelSettings(exact="8bit"))
    coarse, exact = coarse_level(store, torch.float64), exact_level(store, torch.float64)
    for level, x, first in zip(range(2), (key, value), (16, 0), strict=True):
        rough = (coarse[level] - x.double())[:, :, first:].abs().mean()
        assert (exact[level] - x.double())[:, :, first:].abs().mean() < rough / 12
    assert torch.equal(exact[0][:, :, :16], key[:, :, :16].half().double())


def test_an_8bit_store_keeps_what_is_not_packed_as_16_bits_and_packs_what_it_kept():
    key, value = random_tokens(100)
    key[0, 0, 3, 0], value[0, 0, 90, 0], value[0, 0, 91, 0] = 1e9, -1e9, torch.inf
    halves = [x.half() for x in (key, value)]
    halves[0][0, 0, 3, 0], halves[1][0, 0, 90, 0] = 65504.0, -65504.0  # saturated
    for impl in ("reference", "native"):
        store = store_of(key, value, LevelSettings(exact="8bit"), impl=impl)
        rounded = store_of(
            halves[0].float(), halves[1].float(), LevelSettings(exact="8bit"), impl=impl
        )
        assert store.keys.dtype == store.sink_keys.dtype == torch.float16
        assert same_bits(store, rounded)
        assert torch.equal(store.values[:, :, :36], halves[1][:, :, 64:])
        assert torch.equal(store.sink_keys, halves[0][:, :, :16])
    exact = store_of(key.bfloat16(), value.bfloat16(), LevelSettings(exact="8bit"))
    assert torch.equal(exact.sink_keys, key[:, :, :16].bfloat16())


def test_a_constant_channel_and_a_zero_vector_are_exact():
    key, value = random_tokens(64)
    key[..., 3], value[..., 5, :] = 0.625, 0.0
    coarse_key, coarse_value = coarse_level(store_of(key, value), torch.float64)
    assert (coarse_key[..., 3] == 0.625).all()
    assert (coarse_value[..., 5, :] == 0).all()
    lo, step, _, _ = quantize(torch.full((1, 4), 0.1), 15, -1)  # not a float16
    assert abs(float(lo) + 15 * float(step) - 0.1) < 0.1 * 2**-15


def test_huge_numbers_saturate_in_the_coarse_level_alone():
    key, value = random_tokens(64)
    key[0, 0, 40, 2], value[0, 0, 40, 2] = 1e7, -1e7
    store = store_of(key, value)
    for level in coarse_level(store, torch.float64):
        assert torch.isfinite(level).all()
    assert torch.equal(exact_level(store, torch.float32)[0], key)


@pytest.mark.parametrize("impl", ["reference", "native"])
@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_tokens_by_one_by_chunks_or_all_at_once_make_the_same_bits(settings, impl):
    key, value = random_tokens(300)
    whole = store_of(key, value, settings, impl="reference")
    for size in (1, 7, 64, 150):
        store = LevelStore.empty(2, 2, 32, settings=settings)
        for first in range(0, 300, size):
            chunk = slice(first, first + size)
            store.append(key[:, :, chunk], value[:, :, chunk], impl=impl)
        assert same_bits(store, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 40, 64])
@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_the_kernel_packs_the_same_bits(settings, width, dtype):
    key, value = random_tokens(200, width=width, value_width=2 * width)
    key[:, 0, 70:80], value[:, 1, 80] = 0.0, 1e9
    key[0, 0, 100, 1], value[1, 1, 90, 0] = torch.nan, torch.inf
    key[:, 0, 195, :4] = torch.tensor([1e9, -torch.inf, 1e-7, 65512.0])  # not packed yet
    key, value = key.to(dtype), value.to(dtype)
    expected = store_of(key, value, settings, impl="reference")
    assert same_bits(store_of(key, value, settings, impl="native"), expected)


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_padding_is_left_out_of_every_row(impl):
    key, value = random_tokens(200)
    real = torch.ones(2, 200, dtype=torch.bool)
    real[1, :70] = False
    store = store_of(key, value, real=real, impl=impl)
    assert (store.lengths.tolist(), store.longest) == ([200, 130], 200)
    store.select(torch.tensor([1]))
    assert same_bits(store, store_of(key[1:, :, 70:], value[1:, :, 70:]))


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_rows_are_reordered_and_repeated(settings):
    key, value = random_tokens(130)
    store = store_of(key, value, settings)
    store.append(key[:, :, :1], value[:, :, :1])  # the kernel has seen the arrays
    store.select(torch.tensor([1, 0, 1]))
    store.append(key[[1, 0, 1], :, 1:9], value[[1, 0, 1], :, 1:9])
    order = torch.tensor([1, 0, 1])
    more = torch.cat((key, key[:, :, :9]), 2)[order], torch.cat((value, value[:, :, :9]), 2)[order]
    assert same_bits(store, store_of(*more, settings))
    one = store_of(key[:1], value[:1], settings)
    one.repeat(3)
    assert same_bits(one, store_of(key[[0, 0, 0]], value[[0, 0, 0]], settings))


@pytest.mark.parametrize("bits", [(4, 4), (4, 2)])
def test_a_cropped_store_is_as_if_the_rest_never_came(bits):
    key, value = random_tokens(300)
    settings = LevelSettings(bits)
    for length, left in ((-1, 299), (-80, 220), (128, 128), (0, 0), (999, 300)):
        store = store_of(key, value, settings)
        store.crop(length)
        assert same_bits(store, store_of(key[:, :, :left], value[:, :, :left], settings))
        store.append(key[:, :, left:], value[:, :, left:])
        assert same_bits(store, store_of(key, value, settings))
    store = store_of(key, value, settings)
    store.crop(torch.tensor([100, 250]))
    assert (store.lengths.tolist(), store.longest) == ([100, 250], 250)


def test_a_cropped_8bit_store_goes_on_from_its_bytes():
    settings = LevelSettings(exact="8bit")
    key, value = random_tokens(300)
    store = store_of(key, value, settings)
    before = exact_level(store, torch.float32)
    store.crop(-100)  # into a block that was packed
    for level, x in zip(exact_level(store, torch.float32), before, strict=True):
        assert torch.equal(level[:, :, :192], x[:, :, :192])
        assert torch.equal(level[:, :, 192:], x[:, :, 192:200].half().float())
    assert torch.equal(store.keys[:, :, :8], before[0][:, :, 192:200].half())
    within = store_of(key, value, settings)
    within.crop(-20)  # within the newest one nothing is lost
    within.append(key[:, :, 280:], value[:, :, 280:])
    assert same_bits(within, store_of(key, value, settings))


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_a_store_is_saved_and_goes_on_where_it_was(settings, tmp_path):
    from safetensors.torch import load_file, save_file

    key, value = random_tokens(150)
    store = store_of(key, value, settings)
    save_file(store.state(), tmp_path / "store.safetensors")
    loaded = LevelStore.from_state(load_file(tmp_path / "store.safetensors"))
    assert loaded.settings == settings
    assert same_bits(loaded, store)
    for one in (store, loaded):
        one.append(key, value)
    assert same_bits(loaded, store)


def test_a_state_that_is_not_whole_is_refused():
    state = store_of(*random_tokens(150)).state()
    for wrong, message in (
        ({"key_codes": state["key_codes"][:, :, :2]}, "must hold key_codes of torch.uint8"),
        ({"keys": state["keys"].half()}, r"keys of torch.float32 .*got torch.float16"),
        ({"lengths": state["lengths"] + 64}, "must hold key_codes"),
        ({"lengths": torch.tensor([-1, 150])}, "must hold key_codes"),
        ({"settings": state["settings"][:6]}, "without its settings"),
    ):
        with pytest.raises(ValueError, match=message):
            LevelStore.from_state({**state, **wrong})
    del state["value_scales"]
    with pytest.raises(ValueError, match="without value_scales"):
        LevelStore.from_state(state)


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_a_store_filled_in_inference_mode_goes_on_outside(impl):
    with torch.inference_mode():
        key, value = random_tokens(100)
        store = store_of(key, value, impl=impl)
        store.select(torch.tensor([1, 0]))
    more, same = random_tokens(300)
    store.append(more, same, impl=impl)
    store.crop(-1)
    assert store.lengths.tolist() == [399, 399]


def test_a_copy_has_arrays_of_its_own():
    key, value = random_tokens(100)
    store = store_of(key, value)
    query = torch.randn(2, 2, 1, 32)
    before = level_attention(query, store)
    other = copy.deepcopy(store)
    other.append(key, value)
    assert torch.equal(level_attention(query, store), before)
    assert same_bits(other, store_of(torch.cat((key, key), 2), torch.cat((value, value), 2)))


def test_growing_copies_each_token_a_few_times_at_most():
    store = LevelStore.empty(1, 1, 16, value_width=16)
    moved, key = 0, torch.randn(1, 1, 50, 16)
    for _ in range(200):
        address, length = store.keys.data_ptr(), store.longest
        store.append(key, key)
        moved += length * (store.keys.data_ptr() != address)
    assert store.lengths.item() == 10_000
    assert moved < 10 * 10_000


def test_memory_is_as_documented():
    key = torch.randn(1, 1, 8192, 64)
    dense = 2 * key.numel() * 4
    held = {settings: store_of(key, key, settings).bytes_held() / dense for settings in SETTINGS}
    model, eight, model_2, eight_2 = (held[settings] for settings in SETTINGS)
    assert 1.13 < model < 1.14
    assert 0.266 < eight < 0.267
    assert model_2 < model
    assert eight_2 < 0.45


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v: (k[:, :1], v), "key must be .* like the store"),
        (lambda k, v: (k, v[..., :3]), "value must be .* like the store"),
        (lambda k, v: (k.double(), v.double()), "key must be torch.float32"),
        (lambda k, v: (k, v, torch.ones(2, 3, dtype=torch.bool)), "real must be bool"),
    ],
)
def test_wrong_tokens_are_refused(change, message):
    key, value = random_tokens(5)
    with pytest.raises(ValueError, match=message):
        LevelStore.empty(2, 2, 32).append(*change(key, value))


def test_wrong_settings_are_refused():
    for wrong in ({"bits": (5, 4)}, {"bits": (4, 3)}, {"exact": "int8"}, {"sinks": -1}):
        with pytest.raises(ValueError, match="must be"):
            LevelSettings(**wrong)
    with pytest.raises(ValueError, match="must be"):
        LevelSettings((2, 4), "8bit")


def test_symmetric_codes_use_the_whole_range():
    scale, codes, _ = quantize_symmetric(torch.tensor([[-7.0, 3.5, 0.0, 7.0]]), 7)
    assert (scale.item(), codes.tolist()) == (1.0, [[-7.0, 4.0, 0.0, 7.0]])
