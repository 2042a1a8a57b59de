"""What may know of what: gradients, later tokens, and who chooses."""

import pytest
import torch

import polyscale as ps
from tests.ops.opened.cases import random_case

IMPLS = ["reference", "native"]


def dtype_of(impl):
    return torch.float64 if impl == "reference" else torch.float32


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "options", [{}, {"rest": "pool"}, {"mass": 0.9}, {"strict": True}], ids=str
)
def test_no_gradient_comes_from_later_tokens(options, impl):
    torch.manual_seed(0)
    tensors = random_case(150, batch=1, dtype=dtype_of(impl))
    output = ps.opened_attention(*tensors, heavy=32, near=16, impl=impl, **options)
    for position in (0, 63, 64, 100, 149):
        gradients = torch.autograd.grad(
            output[:, :, position].square().sum(), tensors, retain_graph=True
        )
        assert all((gradient[:, :, position + 1 :] == 0).all() for gradient in gradients)
        assert (gradients[2][:, :, position] != 0).any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("options", [{}, {"mass": 0.9}, {"near": 5}, {"rest": "pool"}], ids=str)
def test_strict_rows_do_not_change_with_later_tokens(options, impl):
    torch.manual_seed(0)
    tensors = [x.detach() for x in random_case(203, dtype=dtype_of(impl))]
    common = {"heavy": 32, "near": 16, "strict": True, "impl": impl, **options}
    output = ps.opened_attention(*tensors, **common)
    for position in (1, 7, 8, 77, 128, 202):
        changed = [x.clone() for x in tensors]
        for x in changed:
            x[:, :, position:] = 3 * torch.randn_like(x[:, :, position:])
        after = ps.opened_attention(*changed, **common)
        assert torch.equal(after[:, :, :position], output[:, :, :position])
        cut = ps.opened_attention(*(x[:, :, :position] for x in tensors), **common)
        torch.testing.assert_close(cut, output[:, :, :position], atol=1e-6, rtol=1e-5)


def test_in_a_prompt_later_queries_of_a_block_do_choose():
    torch.manual_seed(0)
    tensors = [x.detach() for x in random_case(256)]
    output = ps.opened_attention(*tensors, heavy=16, near=0)
    changed = [x.clone() for x in tensors]
    changed[0][:, :, 250:] *= 3
    after = ps.opened_attention(*changed, heavy=16, near=0)
    assert torch.equal(after[:, :, :192], output[:, :, :192])  # earlier blocks
    assert not torch.equal(after[:, :, 192:250], output[:, :, 192:250])


def test_the_choice_is_a_constant_for_gradients():
    torch.manual_seed(0)
    query, key, value = random_case(120, batch=1, heads=2, key_heads=1, width=4, value_width=2)

    def attend(query, key, value):
        return ps.opened_attention(
            query, key, value, heavy=16, near=16, impl="reference", scale=0.5
        )

    assert torch.autograd.gradcheck(attend, (query, key, value), fast_mode=True)
