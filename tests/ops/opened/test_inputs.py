"""What is refused, and how implementations are named."""

import pytest
import torch

import polyscale as ps
from tests.ops.opened.cases import random_case


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block must be an integer of at least 1, got 0"),
        ({"block": 40}, "block must be a multiple of key_block=16, got 40; use block=32 or 48"),
        ({"sample": 24}, "block must be a multiple of sample=24, got 64; use block=48 or 72"),
        ({"heavy": 40}, "heavy must be a multiple of key_block=16, got 40; use heavy=32 or 48"),
        ({"near": -1}, "near must be an integer of at least 0, got -1"),
        ({"mass": 1.5}, "mass must be a finite number from 0 to 1, got 1.5"),
        ({"rest": "keep"}, "rest must be one of 'drop', 'pool', got 'keep'"),
        ({"strict": True, "causal": False}, "strict must be False if causal is False, got True"),
        ({"sinks": -1}, "sinks must be an integer of at least 0, got -1; or give positions"),
        ({"sinks": torch.zeros(3, 1, dtype=torch.int64)}, r"positions \[P\] or \[2, P\]"),
        ({"impl": "fast"}, "impl must be one of 'auto', 'reference', 'native', 'flex', got 'fast'"),
        ({"impl": "native"}, "it takes float32 and bfloat16, got torch.float64"),
        ({"key_padding_mask": torch.zeros(2, 9, dtype=torch.bool)}, "key_padding_mask must have"),
        ({"cu_seqlens": torch.tensor([0, 80])}, r"cu_seqlens must have all sequences in one row"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_with_what_to_do(options, message):
    with pytest.raises(ValueError, match=message):
        ps.opened_attention(*random_case(80), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"return_audit": None}, "return_audit must be True or False"),
        ({"scale": "x"}, "scale must be a finite number, got 'x'"),
        ({"sinks": torch.zeros(3)}, "sinks must be an int32 or int64 tensor"),
        ({"sinks": [0, 1.5]}, "sinks must be an integer"),
        ({"key_padding_mask": torch.zeros(2, 80)}, "key_padding_mask must be a bool tensor"),
    ],
    ids=str,
)
def test_wrong_types_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        ps.opened_attention(*random_case(80), **options)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 4, 9), (2, 2, 9, 4), (2, 2, 9, 4)], r"query must have 4 dimensions"),
        ([(2, 4, 9, 4), (1, 2, 9, 4), (2, 2, 9, 4)], "key must have the batch size of query, 2"),
        ([(2, 4, 9, 4), (2, 2, 9, 5), (2, 2, 9, 4)], "key must have the head dimension of query"),
        ([(2, 4, 9, 4), (2, 2, 9, 4), (2, 2, 8, 4)], "value must have the heads and positions"),
        ([(2, 4, 9, 4), (2, 3, 9, 4), (2, 3, 9, 4)], "query must have a multiple of the heads"),
        ([(2, 4, 9, 4), (2, 2, 8, 4), (2, 2, 8, 4)], "query must have at most as many positions"),
        ([(2, 4, 0, 4), (2, 2, 8, 4), (2, 2, 8, 4)], "query must have at least one head"),
    ],
)
def test_wrong_shapes_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        ps.opened_attention(*(torch.zeros(shape) for shape in shapes))


def test_padding_and_packing_exclude_each_other():
    with pytest.raises(ValueError, match="key_padding_mask or cu_seqlens, not both"):
        ps.opened_attention(
            *random_case(8, batch=1),
            key_padding_mask=torch.zeros(1, 8, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, 8]),
        )
    with pytest.raises(ValueError, match="as many positions as key if cu_seqlens is given, 9"):
        ps.opened_attention(*random_case(8, 9, batch=1), cu_seqlens=torch.tensor([0, 9]))


def test_heavy_need_not_fit_where_it_is_ignored():
    tensors = random_case(100)
    output = ps.opened_attention(*tensors, block=48, key_block=24, sample=8, mass=0.9)
    assert output.shape == (2, 4, 100, 8)


def test_all_implementations_are_listed():
    found = {x.name for x in ps.implementations() if x.operation == "opened_attention"}
    assert found == {"reference", "native", "flex"}


def test_doubles_take_the_reference_and_floats_the_kernel():
    tensors = [x.detach() for x in random_case(100)]
    single = [x.float() for x in tensors]
    expected = ps.opened_attention(*tensors, impl="reference")
    assert torch.equal(ps.opened_attention(*tensors), expected)
    assert torch.equal(ps.opened_attention(*single), ps.opened_attention(*single, impl="native"))


def test_half_precision_is_accumulated_in_float32():
    torch.manual_seed(0)
    tensors = [x.detach().half() for x in random_case(100)]
    output = ps.opened_attention(*tensors)
    expected = ps.opened_attention(*(x.double() for x in tensors))
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.double(), expected, atol=2e-3, rtol=2e-3)


def test_nothing_leaks_from_padding_even_if_it_is_not_finite():
    torch.manual_seed(0)
    mask = torch.zeros(2, 100, dtype=torch.bool)
    mask[:, :10] = True
    tensors = [x.detach().float() for x in random_case(100)]
    expected = ps.opened_attention(*tensors, key_padding_mask=mask, impl="native")
    for x in tensors:
        x[:, :, :10] = float("nan")
    assert torch.equal(
        ps.opened_attention(*tensors, key_padding_mask=mask, impl="native"), expected
    )


def test_fake_tensors_give_the_shape():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        query, key = torch.empty(1, 4, 300, 16), torch.empty(1, 2, 300, 16)
        output, audit = ps.opened_attention(query, key, key, return_audit=True)
    assert output.shape == (1, 4, 300, 16)
    assert audit.opened.shape == (1, 2, 5, 19)
