import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from polyscale.cost.forward import count_forward_flops
from polyscale.cost.hkt import attention_cost
from polyscale.models import (
    HKTConfig,
    HKTForSequenceClassification,
    HSAConfig,
    HSAForCausalLM,
)

T, C, H, LAYERS, MLP, CLASSES = 64, 32, 4, 2, 48, 10
D = C // H


def hkt(levels, **options):
    config = HKTConfig(
        vocab_size=20,
        hidden_size=C,
        num_hidden_layers=LAYERS,
        num_attention_heads=H,
        intermediate_size=MLP,
        max_position_embeddings=2048,
        num_labels=CLASSES,
        eos_token_id=None,
        levels=levels,
        **options,
    )
    return HKTForSequenceClassification(config)


def tokens(batch=1, length=T):
    return {"input_ids": torch.ones(batch, length, dtype=torch.long)}


def by_hand(lengths):
    """Multiplications and additions of matrix products, level by level."""
    projections = 2 * C * C * (2 * sum(lengths) + 2 * T)  # queries and keys of all levels, v, out
    scores = 2 * H * D * sum(n * n for n in lengths)
    values = 2 * H * D * T * T
    mlp = 2 * 2 * T * C * MLP
    return LAYERS * (projections + scores + values + mlp) + 2 * C * CLASSES


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("levels", "lengths"), [(1, [64]), (2, [64, 32]), (3, [64, 32, 16])])
def test_hkt_costs_what_one_computes_by_hand(levels, lengths, causal):
    assert count_forward_flops(hkt(levels, causal=causal), tokens()) == by_hand(lengths)


def test_the_scores_of_three_levels_cost_the_paper_s_ratio():
    """What is left of a model's count without its projections, values and MLP."""
    without = [
        by_hand(lengths) - LAYERS * 2 * H * D * sum(n * n for n in lengths)
        for lengths in ([64], [64, 32, 16])
    ]
    one, three = (
        count_forward_flops(hkt(levels), tokens()) - rest
        for levels, rest in zip((1, 3), without, strict=True)
    )
    assert three / one == 1.3125
    assert one == LAYERS * attention_cost(1, T, D, heads=H).standard.flops


@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa", "native"])
def test_the_count_does_not_depend_on_the_implementation(impl):
    model = hkt(3, attention_impl=impl).train()
    before = [block.attention.impl for block in model.model.blocks]
    assert count_forward_flops(model, tokens()) == by_hand([64, 32, 16])
    assert [block.attention.impl for block in model.model.blocks] == before
    assert all(module.training for module in model.modules()), "the model is as it was"


def test_layers_that_no_kernel_takes_are_counted_too():
    relative = count_forward_flops(hkt(3, relative_positions=4), tokens())
    assert relative == by_hand([64, 32, 16])
    assert count_forward_flops(hkt(3).double(), tokens()) == by_hand([64, 32, 16])


def test_padding_counts_as_if_it_were_computed():
    mask = torch.ones(1, T, dtype=torch.long)
    mask[:, 40:] = 0
    assert count_forward_flops(hkt(3), {**tokens(), "attention_mask": mask}) == by_hand(
        [64, 32, 16]
    )


def test_a_batch_counts_all_its_samples():
    model = hkt(2)
    assert count_forward_flops(model, tokens(batch=3)) == 3 * count_forward_flops(model, tokens())


def test_packed_sequences_do_not_pay_for_each_other():
    model = hkt(1).model
    packed = {**tokens(), "cu_seqlens": torch.tensor([0, 48, 64])}
    saved = LAYERS * 2 * 2 * H * D * (64**2 - 48**2 - 16**2)
    assert count_forward_flops(model, tokens()) - count_forward_flops(model, packed) == saved


def test_long_sequences_need_no_memory_of_their_square():
    """Four heads at 16,384 positions would need 4 GB for each matrix of scores."""
    model = hkt(3, positions="none")
    length = 16_384
    grown = count_forward_flops(model, tokens(length=length))
    scores_and_values = 2 * H * D * length**2 * (1.3125 + 1)
    assert grown > LAYERS * scores_and_values


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_hugging_face_models_count_their_attention_on_a_cpu(implementation):
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": C, "num_hidden_layers": LAYERS}
    config = BertConfig(
        **sizes,
        num_attention_heads=H,
        intermediate_size=MLP,
        num_labels=CLASSES,
        attn_implementation=implementation,
    )
    found = count_forward_flops(BertForSequenceClassification(config).train(), tokens())
    pooler = 2 * C * C
    assert found == by_hand([T]) + pooler


def test_a_causal_hugging_face_model_agrees_between_its_implementations():
    counts = []
    for implementation in ("eager", "sdpa"):
        config = GPT2Config(
            vocab_size=20, n_positions=T, n_embd=C, n_layer=1, n_head=H,
            attn_implementation=implementation, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        counts.append(count_forward_flops(GPT2LMHeadModel(config), tokens()))
    assert counts[0] == counts[1] > 0


def test_hsa_costs_less_than_standard_attention_and_its_count_grows_with_the_length():
    config = HSAConfig(
        vocab_size=20, hidden_size=C, num_hidden_layers=1, num_attention_heads=H,
        intermediate_size=MLP, eos_token_id=None,
    )  # fmt: skip
    model = HSAForCausalLM(config)
    linear = 2 * (4 * C * C + 2 * C * MLP + C * 20)  # of one token: projections, MLP, logits
    short, long = (count_forward_flops(model, tokens(length=n)) - n * linear for n in (256, 1024))
    assert short > 0
    assert 4 * short <= long < 16 * short, "between linear and quadratic"
    assert long < 2 * 2 * C * 1024**2 / 4, "a quarter of standard attention at most"


def test_the_fused_encoder_layer_of_torch_is_counted():
    layer = nn.TransformerEncoderLayer(C, H, MLP, batch_first=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)

    found = count_forward_flops(Model(), {"x": torch.zeros(1, T, C)})
    assert found == (by_hand([T]) - 2 * C * CLASSES) / LAYERS
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_batch_that_is_no_mapping_is_refused_by_name():
    with pytest.raises(TypeError, match="batch"):
        count_forward_flops(nn.Linear(2, 2), torch.zeros(1, 2))
