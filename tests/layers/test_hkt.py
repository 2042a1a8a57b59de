import copy
import itertools
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyscale as ps
from polyscale.layers.hkt_cache import HKTCache
from polyscale.ops.hkt.native.library import LIBRARY
from polyscale.training.presets import preset_config

# One entry for every option of the layer, and some of them together.
OPTIONS = {
    "default": {},
    "standard": {"levels": 1},
    "four levels": {"levels": 4},
    "dense": {"downsampling": "dense"},
    "mean": {"downsampling": "mean"},
    "wide": {"downsampling_width": 4},
    "width 1": {"downsampling_width": 1},
    "merged values": {"values": "merged"},
    "level-0 filter": {"filter_width": 3},
    "dense level-0 filter": {"filter_width": 3, "downsampling": "dense"},
    "own projections": {"shared_projections": False},
    "fixed weights": {"level_weights": (0.5, 0.2, 0.3)},
    "one level alone": {"level_weights": (0.0, 0.0, 1.0)},
    "relative": {"relative_positions": 4},
    "rotary": {"rotary": True},
    "local start": {"rotary": True, "local_start": 1.0},
    "psd": {"kernel": "psd"},
    "reference": {"impl": "reference"},
    "together": {
        "levels": 4,
        "values": "merged",
        "filter_width": 2,
        "downsampling_width": 3,
        "rotary": True,
        "kernel": "psd",
        "shared_projections": False,
    },
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def make_layer(dtype=torch.float64, **options):
    """A layer none of whose weights is at its starting value, that keeps the size of its input."""
    layer = ps.HKTAttention(16, 2, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return layer.to(dtype)


def largest(x):
    return x.detach().abs().max().item()


@every_option
def test_no_output_depends_on_a_later_input(options):
    layer = make_layer(**options)
    x = torch.randn(1, 13, 16, dtype=torch.float64, requires_grad=True)
    output = layer(x)
    for t in range(13):
        cotangent = torch.zeros_like(output)
        cotangent[:, t] = torch.randn(16, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(output, x, cotangent, retain_graph=True)
        assert torch.count_nonzero(gradient[:, t + 1 :]) == 0
        assert torch.count_nonzero(gradient[:, t]) > 0


@every_option
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_any_length_changes_no_real_token(options, causal, side):
    layer = make_layer(torch.float32, causal=causal, **options)
    x = torch.randn(2, 11, 16)
    expected = layer(x)
    for amount in range(1, 18):
        junk = 10 * torch.randn(2, amount, 16)
        mask = torch.zeros(2, 11 + amount, dtype=torch.bool)
        if side == "left":
            padded, mask[:, :amount], real = torch.cat((junk, x), 1), True, slice(amount, None)
        else:
            padded, mask[:, 11:], real = torch.cat((x, junk), 1), True, slice(11)
        output = layer(padded, key_padding_mask=mask)
        assert largest(output[:, real] - expected) <= 1e-5
        assert torch.count_nonzero(output[mask]) == 0


@every_option
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_are_what_each_gives_alone(options, causal):
    layer = make_layer(causal=causal, **options)
    bounds = torch.tensor([0, 5, 6, 14, 21], dtype=torch.int32)
    x = torch.randn(1, 21, 16, dtype=torch.float64)
    alone = [layer(x[:, start:end]) for start, end in itertools.pairwise(bounds)]
    assert largest(layer(x, cu_seqlens=bounds) - torch.cat(alone, 1)) < 1e-11


@every_option
def test_a_row_alone_is_the_row_in_the_batch(options):
    layer = make_layer(causal=False, **options)
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    mask[0, :4], mask[1, 7:] = True, True
    together = layer(x, key_padding_mask=mask)
    for row in range(3):
        alone = layer(x[row : row + 1], key_padding_mask=mask[row : row + 1])
        assert largest(together[row] - alone[0]) < 1e-11


@every_option
@pytest.mark.parametrize(
    "pieces", [[1] * 21, [6] + [1] * 15, [4, 3, 5, 9], [20, 1]], ids=["1s", "6+1s", "mixed", "20+1"]
)
@pytest.mark.parametrize("grad", [True, False])
def test_tokens_fed_piece_by_piece_give_what_they_give_at_once(options, pieces, grad):
    layer = make_layer(**options)
    x = torch.randn(3, 21, 16, dtype=torch.float64)
    mask = torch.zeros(3, 21, dtype=torch.bool)
    mask[0, :5], mask[1, :2] = True, True
    for padding in (None, mask):
        expected = layer(x, padding)
        cache, outputs, start = HKTCache(), [], 0
        with torch.set_grad_enabled(grad):
            for count in pieces:
                piece = slice(start, start + count)
                piece_mask = None if padding is None else padding[:, piece]
                outputs.append(layer(x[:, piece], piece_mask, cache=cache))
                start += count
        assert largest(torch.cat(outputs, 1) - expected) < 1e-11


@every_option
@pytest.mark.parametrize("padded", [False, True])
def test_in_float32_tokens_one_by_one_give_what_they_give_at_once(options, padded):
    # The native kernel decodes float32; prompts of different lengths take the general way.
    layer = make_layer(torch.float32, **options)
    x = torch.randn(3, 21, 16)
    mask = torch.zeros(3, 21, dtype=torch.bool)
    if padded:
        mask[0, :5], mask[1, :2] = True, True
    cache, outputs = HKTCache(), []
    with torch.no_grad():
        expected = layer(x, mask if padded else None)
        for start, end in ((0, 6), *((t, t + 1) for t in range(6, 21))):
            piece_mask = mask[:, start:end] if padded else None
            outputs.append(layer(x[:, start:end], piece_mask, cache=cache))
    assert cache.together != padded
    assert largest(torch.cat(outputs, 1) - expected) < 1e-5 * largest(expected)


@pytest.mark.parametrize("padded_call", range(4))
def test_rows_that_part_after_some_calls_go_on_rightly(padded_call):
    layer = make_layer(values="merged", filter_width=2)
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, 5 * padded_call : 5 * padded_call + 3] = True
    expected = layer(x, mask)
    cache, outputs = HKTCache(), []
    for call in range(4):
        piece = slice(5 * call, 5 * call + 5)
        piece_mask = mask[:, piece] if call == padded_call else None
        outputs.append(layer(x[:, piece], piece_mask, cache=cache))
        assert cache.together == (call < padded_call)
    assert largest(torch.cat(outputs, 1) - expected) < 1e-11


@pytest.mark.parametrize("change", ["select", "repeat"])
def test_a_cache_whose_rows_were_changed_goes_on_with_them(change):
    layer = make_layer(torch.float32)
    x = torch.randn(2, 12, 16)
    cache = HKTCache()
    rows = torch.tensor([1, 1, 0] if change == "select" else [0, 0, 1, 1])
    with torch.no_grad():
        layer(x[:, :7], cache=cache)
        cache.select(rows) if change == "select" else cache.repeat(2)
        outputs = [layer(x[rows, t : t + 1], cache=cache) for t in range(7, 12)]
        expected = layer(x)[rows, 7:]
    assert largest(torch.cat(outputs, 1) - expected) < 1e-5 * largest(expected)


@pytest.mark.parametrize("levels", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_tokens_and_several_take_turns(levels, dtype):
    # Coarse scores are kept between single tokens: over the ends of the kernel's chunks of 512,
    # after calls that bring several tokens, with and without gradients, and with rows changed.
    layer = make_layer(torch.float32, levels=levels, rotary=True).to(dtype)
    x = torch.randn(2, 1100, 16).to(dtype)
    expected, start = layer(x).detach(), 0
    cache, outputs, rows = HKTCache(), [], torch.tensor([0, 1])
    pieces = [500, *[1] * 21, 3, *[1] * 6, 40, *[1] * 9, 437, *[1] * 20, 2, *[1] * 5]
    for number, count in enumerate(pieces):
        with torch.set_grad_enabled(number == 12):
            piece = x[rows, start : start + count]
            outputs.append(layer(piece, cache=cache).detach()[rows.argsort()])
        start += count
        if number in (7, 30):
            cache.select(torch.tensor([1, 0]))
            rows = rows.flip(0)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    found = torch.cat(outputs, 1)
    assert largest(found - expected[:, :start]) < tolerance * largest(expected)


@pytest.mark.skipif(LIBRARY.why_not_built() is not None, reason="no native kernel")
def test_coarse_keys_are_read_when_their_level_gains_one():
    layer = make_layer(torch.float32, levels=3)
    x = torch.randn(1, 24, 16)
    cache, readings = HKTCache(), []
    with torch.no_grad():
        layer(x[:, :16], cache=cache)
        for t in range(16, 24):
            keys = [kept.clone() for kept in cache.keys]
            for level in (1, 2):
                cache.keys[level].fill_(float("nan"))
                trial = copy.deepcopy(cache)
                found = layer(x[:, t : t + 1], cache=trial)
                readings.append((t, level, bool(found.isnan().any())))
                cache.keys[level] = keys[level].clone()
            layer(x[:, t : t + 1], cache=cache)
    assert readings == [
        (t, level, t == 16 or t % 2**level == 0) for t in range(16, 24) for level in (1, 2)
    ]


@pytest.mark.parametrize("rows", [9, 100])
def test_projections_that_were_changed_from_outside_are_called(rows):
    layer = make_layer(levels=2)
    x = torch.randn(1, rows, 16, dtype=torch.float64)
    before = layer(x)
    layer.k_proj[0].register_forward_hook(lambda module, arguments, output: 2 * output)
    after = layer(x)
    assert largest(after - before) > 1e-3
    expected = make_layer(levels=2)
    expected.load_state_dict(layer.state_dict())
    with torch.no_grad():
        expected.k_proj[0].weight *= 2
        expected.k_proj[0].bias *= 2
    assert largest(after - expected(x)) < 1e-12


@pytest.mark.parametrize("kernel", ["dot", "psd"])
def test_attention_that_starts_locally_falls_off_with_distance(kernel):
    layer = ps.HKTAttention(64, 2, rotary=True, local_start=2.0, kernel=kernel)
    with torch.no_grad():
        for projection in (*layer.q_proj, *layer.k_proj):
            projection.weight.zero_()
    attention = layer(torch.randn(1, 100, 64), return_details=True)[1].attention[0, :, -1]  # [H, T]
    assert (attention[:, -1] > 3 * attention[:, -16]).all()
    assert (attention[:, -20:].sum(-1) > 2 * attention[:, :80].sum(-1)).all()


@pytest.mark.parametrize(
    "options",
    [
        {"local_start": 1.0},
        {"rotary": True, "local_start": -1.0},
        {"rotary": True, "local_start": float("nan")},
        {"rotary": True, "bias": False, "local_start": 1.0},
    ],
)
def test_a_local_start_that_means_nothing_is_refused(options):
    with pytest.raises(ValueError, match="local_start"):
        ps.HKTAttention(64, 2, **options)


def test_gradients_flow_through_the_cache():
    layer = make_layer()
    x = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    cache, outputs = HKTCache(), []
    for t in range(9):
        outputs.append(layer(x[:, t : t + 1], cache=cache))
    stepwise = torch.autograd.grad(torch.cat(outputs, 1).square().sum(), x)[0]
    at_once = torch.autograd.grad(layer(x).square().sum(), x)[0]
    assert largest(stepwise - at_once) < 1e-10


def test_a_level_of_the_cache_gains_an_entry_every_so_many_tokens():
    layer, cache = make_layer(), HKTCache()
    for t in range(20):
        layer(torch.randn(1, 1, 16, dtype=torch.float64), cache=cache)
        keys, value = cache.filled()
        assert [key.shape[2] for key in keys] == [t + 1, t // 2 + 1, t // 4 + 1]
        assert value.shape[2] == t + 1


def test_lengths_say_the_same_as_a_mask_on_the_right():
    layer = make_layer()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    lengths = torch.tensor([4, 9])
    mask = torch.arange(9) >= lengths[:, None]
    assert torch.equal(layer(x, lengths=lengths), layer(x, mask))


@pytest.mark.parametrize("values", ["fine", "merged"])
def test_all_weight_on_the_fine_level_is_torch_multi_head_attention(values):
    standard = nn.MultiheadAttention(16, 2, batch_first=True).double()
    hkt = ps.HKTAttention(16, 2, levels=3, level_weights=(1, 0, 0), causal=False).double()
    one = ps.HKTAttention(16, 2, levels=1, causal=False, values=values).double()
    for layer in (hkt, one):
        with torch.no_grad():
            weights = standard.in_proj_weight.chunk(3)
            biases = standard.in_proj_bias.chunk(3)
            projections = (layer.q_proj[0], layer.k_proj[0], layer.v_proj)
            for projection, weight, bias in zip(projections, weights, biases, strict=True):
                projection.weight.copy_(weight)
                projection.bias.copy_(bias)
            layer.out_proj.load_state_dict(standard.out_proj.state_dict())
        x = torch.randn(2, 11, 16, dtype=torch.float64)
        assert largest(layer(x) - standard(x, x, x)[0]) < 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("relative_positions", [0, 3])
def test_the_details_explain_the_output(causal, relative_positions):
    layer = make_layer(causal=causal, relative_positions=relative_positions)
    x = torch.randn(2, 10, 16, dtype=torch.float64)
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, :3] = True
    output, details = layer(x, mask, return_details=True)
    assert torch.equal(output, layer(x, mask))
    assert torch.allclose(details.level_weights.sum(-1), torch.ones(2, dtype=torch.float64))
    assert [s.shape for s in details.level_scores] == [(2, 2, n, n) for n in (10, 5, 3)]
    # Rows of real tokens sum to one, and the matrix times the values is the output.
    real = (~mask).double()[:, None]
    assert largest(details.attention.sum(-1) - real) < 1e-12
    value = layer.v_proj(x).unflatten(-1, (2, 8)).transpose(1, 2)
    attended = (details.attention @ value).transpose(1, 2).flatten(2)
    rebuilt = layer.out_proj(attended).masked_fill(mask[..., None], 0.0)
    assert largest(rebuilt - output) < 1e-12
    # The scores are those that were merged, here for the row without padding.
    merged = sum(
        details.level_weights[:, level, None, None]
        * scores[1][:, torch.arange(10) >> level][..., torch.arange(10) >> level]
        for level, scores in enumerate(details.level_scores)
    )
    if causal:
        merged = merged.masked_fill(torch.ones(10, 10).triu(1).bool(), float("-inf"))
    assert largest(merged.softmax(-1) - details.attention[1]) < 1e-12


def test_training_moves_every_parameter():
    layer = ps.HKTAttention(16, 2, values="merged", filter_width=2, relative_positions=3)
    layer(torch.randn(2, 20, 16)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        if name.endswith("k_proj.0.bias"):
            continue  # moves all scores of a row alike, which softmax does not see
        assert parameter.grad is not None, name
        assert torch.count_nonzero(parameter.grad) > 0, name


def test_the_reference_has_second_derivatives_in_float32():
    layer = make_layer(torch.float32, impl="reference")
    x = torch.randn(1, 9, 16, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert torch.count_nonzero(second) > 0


def test_level_weights_start_equal_and_stay_convex():
    layer = ps.HKTAttention(16, 2, levels=4)
    assert torch.allclose(layer.level_weights, torch.full((2, 4), 0.25))
    torch.nn.init.normal_(layer.level_logits, std=3)
    assert torch.allclose(layer.level_weights.sum(-1), torch.ones(2))
    assert (layer.level_weights >= 0).all()


BACKENDS = ["aot_eager", *(["inductor"] if shutil.which("g++") else [])]


def options_of(task):
    """The attention of a preset as options of the layer."""
    model = preset_config(task, "hkt", "small").model_options
    names = ("values", "downsampling", "downsampling_width", "filter_width", "local_start")
    known = {name: model[name] for name in names if name in model}
    return known | {"causal": model.get("causal", True), "rotary": model["positions"] == "rotary"}


@pytest.mark.parametrize("options", [{}, OPTIONS["together"], {"causal": False}])
def test_forward_and_backward_compile_without_a_graph_break(options):
    layer = make_layer(torch.float32, **options)
    x = torch.randn(2, 11, 16, requires_grad=True)
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0, :4] = True
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for padding in (None, mask):
        expected = torch.autograd.grad(layer(x, padding).square().sum(), x)[0]
        actual = torch.autograd.grad(compiled(x, padding).square().sum(), x)[0]
        assert largest(actual - expected) < 1e-4 * largest(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_code_gives_the_same_numbers(backend):
    layer = make_layer(torch.float32, levels=2)
    x = torch.randn(2, 11, 16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert largest(compiled(x) - layer(x)) < 1e-5


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("aot_eager", {"kernel": "psd"}),
        ("aot_eager", {"kernel": "psd", "causal": False}),
        *((backend, options_of("listops")) for backend in BACKENDS),
        ("aot_eager", options_of("imdb-char")),
    ],
)
def test_compiled_code_serves_one_length_after_the_other(backend, options):
    # The second length makes the graph dynamic, the third runs what was compiled for it.
    layer = make_layer(torch.float32, **options)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend)
    for length in (64, 65, 96):
        x = torch.randn(2, length, 16, requires_grad=True)
        inputs = [x, *layer.parameters()]
        expected, actual = layer(x), compiled(x)
        assert largest(actual - expected) < 1e-5
        exact = torch.autograd.grad(expected.square().sum(), inputs)
        found = torch.autograd.grad(actual.square().sum(), inputs)
        for one, other in zip(found, exact, strict=True):
            assert largest(one - other) < 1e-4 * max(1.0, largest(other))


@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"kernel": "psd"}])
def test_an_exported_layer_serves_every_length(options):
    layer = make_layer(torch.float32, **options).eval()
    dynamic = ({1: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(layer, (torch.randn(2, 64, 16),), dynamic_shapes=dynamic)
    for length in (8, 63, 64, 65, 200):
        x = torch.randn(2, length, 16)
        assert largest(exported.module()(x) - layer(x)) < 1e-5


def test_autocast_runs_in_bfloat16_close_to_float32():
    layer = make_layer(torch.float32, rotary=True)
    x = torch.randn(2, 11, 16)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x)
    assert half.dtype == torch.bfloat16
    assert largest(half.float() - layer(x)) < 0.05 * largest(layer(x))


def test_a_layer_in_half_precision_gives_half_precision():
    layer = make_layer(torch.bfloat16)
    assert layer(torch.randn(1, 9, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
    cache = HKTCache()
    for _ in range(3):
        output = layer(torch.randn(1, 1, 16, dtype=torch.bfloat16), cache=cache)
    assert output.dtype == torch.bfloat16


def test_standard_attention_by_the_layer_is_scaled_dot_product_attention():
    layer = make_layer(levels=1)
    x = torch.randn(2, 9, 16, dtype=torch.float64)

    def heads(y):
        return y.unflatten(-1, (2, 8)).transpose(1, 2)

    q, k, v = (heads(p(x)) for p in (layer.q_proj[0], layer.k_proj[0], layer.v_proj))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert largest(layer(x) - layer.out_proj(attended.transpose(1, 2).flatten(2))) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 0}, "levels must be an integer of at least 1, got 0; use levels=1"),
        ({"num_heads": 3}, "d_model must be a multiple"),
        ({"downsampling": "max"}, "downsampling must be one of"),
        ({"downsampling_width": 0}, "width"),
        ({"values": "coarse"}, "values must be one of"),
        ({"kernel": "rbf"}, "kernel must be one of"),
        (
            {"level_weights": "uniform"},
            "level_weights.*'learned'.*or pass 3 numbers",
        ),
        ({"level_weights": (0.5, 0.5)}, "level_weights must be 3 numbers"),
        ({"level_weights": (0.5, 0.6, -0.1)}, "finite numbers of at least 0"),
        ({"level_weights": (0.5, 0.5, float("nan"))}, "finite"),
        ({"level_weights": (0.5, 0.5, 0.5)}, "sum to 1"),
        ({"relative_positions": -1}, "relative_positions"),
        ({"kernel": "psd", "relative_positions": 4}, "relative_positions must be 0"),
        ({"kernel": "psd", "num_heads": 8}, "multiple of 4"),
        ({"rotary": True, "num_heads": 16}, "multiple of 2"),
        ({"impl": "magic"}, "impl must be one of"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        ps.HKTAttention(**{"d_model": 16, "num_heads": 2, **options})


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (torch.zeros(1, 4, 15), {}, ValueError, "x must have shape"),
        (torch.zeros(4, 16), {}, ValueError, "x must have shape"),
        (torch.zeros(1, 4, 16).long(), {}, TypeError, "x must be a floating tensor"),
        (torch.zeros(1, 0, 16), {}, ValueError, "empty sequence"),
        (
            torch.zeros(1, 4, 16),
            {"key_padding_mask": torch.zeros(1, 5).bool()},
            ValueError,
            "key_padding_mask",
        ),
        (torch.zeros(1, 4, 16), {"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens"),
        (torch.zeros(1, 4, 16), {"lengths": torch.tensor([1, 2])}, ValueError, "lengths"),
        (
            torch.zeros(1, 4, 16),
            {"lengths": torch.tensor([1]), "cu_seqlens": torch.tensor([0, 4])},
            ValueError,
            "pass only one of",
        ),
        (
            torch.zeros(1, 4, 16),
            {"cache": HKTCache(), "return_details": True},
            ValueError,
            "cache must be None with cu_seqlens or return_details",
        ),
    ],
)
def test_bad_input_is_refused_by_name(x, arguments, error, message):
    with pytest.raises(error, match=message):
        ps.HKTAttention(16, 2)(x, **arguments)


def test_a_cache_is_refused_where_it_would_be_wrong():
    with pytest.raises(ValueError, match="causal=True"):
        ps.HKTAttention(16, 2, causal=False)(torch.zeros(1, 4, 16), cache=HKTCache())
    layer, cache = ps.HKTAttention(16, 2), HKTCache()
    layer(torch.zeros(2, 4, 16), cache=cache)
    with pytest.raises(ValueError, match="batch size of the cache, 2, got 3"):
        layer(torch.zeros(3, 1, 16), cache=cache)
