import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import polyscale as ps
from tests.models.test_hkt import largest, left_padded, tokens

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
STRUCTURES = {
    "windows of 2": {"windows": [2]},
    "windows of 3 then 4": {"windows": [3, 4]},
    "sentences and paragraphs": {"boundary_token_ids": [[5, 6], [7]]},
    "learned positions": {"windows": [4], "positions": "learned"},
    "no norm": {"windows": [4], "normalize": False, "positions": "none"},
}
every_structure = pytest.mark.parametrize("options", STRUCTURES.values(), ids=STRUCTURES.keys())


def make(**options):
    model = ps.HSAForCausalLM(ps.HSAConfig(**{**SMALL, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def text(*shape):
    """Random tokens with many sentence and paragraph ends among them."""
    return torch.randint(3, 12, shape)


@every_structure
def test_no_token_depends_on_a_later_one(options):
    model = make(**options).double()
    ids = text(1, 21)
    embedded = model.model.embeddings(ids).detach().requires_grad_()
    if model.config.boundary_token_ids is None:
        output = model.model(inputs_embeds=embedded).last_hidden_state
    else:
        # Structure comes from ids, so the gradient is taken at the embedding's output.
        handle = model.model.embeddings.register_forward_hook(lambda *_: embedded)
        output = model.model(ids).last_hidden_state
        handle.remove()
    for t in range(21):
        cotangent = torch.zeros_like(output)
        cotangent[:, t] = torch.randn(16, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(output, embedded, cotangent, retain_graph=True)
        assert torch.count_nonzero(gradient[:, t + 1 :]) == 0
        assert torch.count_nonzero(gradient[:, t]) > 0


@every_structure
def test_changing_a_later_token_changes_no_earlier_logit(options):
    model = make(**options).double()
    ids = text(1, 21)
    other = ids.clone()
    other[:, 12:] = text(1, 9)
    # Another text may have another tree: the same sums in another order.
    assert largest(model(ids).logits[:, :12] - model(other).logits[:, :12]) < 1e-12


@every_structure
@pytest.mark.parametrize("prompt", [1, 2, 9, 20])
def test_cached_logits_equal_the_full_forward(options, prompt):
    model = make(**options)
    ids = text(2, prompt + 40)
    full = model(ids, use_cache=False).logits
    output = model(ids[:, :prompt], use_cache=True)
    assert largest(output.logits - full[:, :prompt]) <= 1e-4
    for t in range(prompt, prompt + 40):
        output = model(ids[:, t : t + 1], past_key_values=output.past_key_values)
        assert largest(output.logits[:, 0] - full[:, t]) <= 1e-4


@every_structure
@pytest.mark.parametrize("how", ["greedy", "beams"])
def test_generate_writes_the_same_with_and_without_a_cache(options, how):
    model = make(**options)
    ids, mask = left_padded(text(4, 20), [1, 7, 20, 12])
    beams = {"num_beams": 3} if how == "beams" else {}
    written = [
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
            use_cache=use_cache,
            **beams,
        )
        for use_cache in (True, False)
    ]
    assert torch.equal(*written)


@every_structure
def test_a_prompt_in_a_padded_batch_goes_on_as_it_does_alone(options):
    model = make(**options)
    ids, mask = left_padded(text(3, 14), [3, 14, 9])
    together = model.generate(
        ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    for row, length in enumerate([3, 14, 9]):
        alone = model.generate(
            ids[row : row + 1, -length:],
            attention_mask=mask[row : row + 1, -length:],
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )
        assert torch.equal(together[row, 14:], alone[0, length:])


@every_structure
def test_padding_on_either_side_changes_no_real_token(options):
    model = make(**options)
    ids = text(2, 9)
    expected = model(ids).logits
    for amount in (1, 5, 17):
        junk, ones, zeros = text(2, amount), torch.ones(2, 9), torch.zeros(2, amount)
        for order in (0, 1):
            padded = torch.cat((junk, ids)[:: 1 - 2 * order], 1)
            mask = torch.cat((zeros, ones)[:: 1 - 2 * order], 1).long()
            output = model(padded, mask).logits
            assert largest(output[mask == 1].view(2, 9, -1) - expected) <= 1e-5


@every_structure
def test_a_model_comes_back_bit_for_bit(options, tmp_path):
    model = make(**options)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = text(2, 15)
    assert type(loaded) is ps.HSAForCausalLM
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_one_wide_window_is_standard_causal_attention():
    model = make(windows=[64], normalize=False, num_hidden_layers=1)
    x = torch.randn(2, 30, 16)
    attention = model.model.blocks[0].attention
    tree = ps.SignalTree.from_windows(30, (64,))
    query, key, value = attention._project(x, tree)
    from polyscale.layers.positions import rotate

    position = torch.arange(30)
    expected = torch.nn.functional.scaled_dot_product_attention(
        rotate(query, position), rotate(key, position), value, is_causal=True
    )
    expected = attention.out_proj(expected.transpose(1, 2).flatten(2))
    assert largest(attention(x, tree) - expected) <= 1e-5


def test_training_reaches_every_parameter_with_and_without_checkpointing():
    model = make(windows=[4]).train()
    ids, mask = left_padded(tokens(2, 23), [23, 9])
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*gradients, strict=True))


def test_a_cache_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"past_key_values must be a DynamicCache\(config"):
        make()(tokens(1, 3), past_key_values=DynamicCache())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windows": []}, "windows must be"),
        ({"windows": [1]}, "windows must be"),
        ({"boundary_token_ids": [[]]}, "boundary_token_ids"),
        ({"positions": "sinus"}, "positions must be one of"),
        ({"hidden_size": 15}, "hidden_size must be a multiple"),
        ({"hidden_size": 6}, "even"),
        ({"dropout": 2.0}, "dropout"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(options, message):
    with pytest.raises(Exception, match=message):
        ps.HSAConfig(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass either"),
        ({"input_ids": tokens(4)}, "input_ids must have shape"),
        ({"input_ids": tokens(1, 4), "cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens"),
        ({"input_ids": tokens(1, 4), "output_attentions": True}, "output_attentions"),
        ({"input_ids": tokens(1, 4), "attention_mask": torch.ones(1, 5)}, "attention_mask"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        make()(**arguments)


def test_structure_by_tokens_needs_the_tokens():
    model = make(boundary_token_ids=[[5]])
    with pytest.raises(ValueError, match="need input_ids"):
        model(inputs_embeds=torch.zeros(1, 4, 16))
