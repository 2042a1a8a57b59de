"""One entry point for every kind of model, also as part of `ps.theory`."""

import pytest
import torch
import transformers

import polyscale as ps
from polyscale import analysis
from polyscale.layers.hsa import HSAAttention
from tests.theory.helpers import draw, random_layer, randomise


def bert():
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return transformers.BertModel(config)


def test_the_layers_of_a_model_decide_how_it_is_analyzed():
    tree = ps.SignalTree.from_windows(6, (2,))
    hsa = randomise(HSAAttention(16, 2)).double()
    for model, batch, options, kind in (
        (random_layer(), draw(1, 6, 16), {}, "hkt"),
        (hsa, {"x": draw(1, 6, 16), "tree": tree}, {}, "hsa"),
        ((draw(2, 6, 4), draw(2, 6, 4, seed=1)), None, {"tree": tree}, "hsa"),
        (bert(), torch.arange(6)[None], {}, "transformer"),
    ):
        found = analysis.analyze(model, batch, title="Mine", **options)
        assert (found["meta"]["kind"], found["meta"]["title"]) == (kind, "Mine")


@pytest.mark.parametrize("name", analysis.__all__[1:-1])
def test_the_theory_offers_the_same_functions(name):
    assert getattr(ps.theory, name) is getattr(analysis, name)
    assert callable(getattr(ps.theory, name))


def test_the_theory_has_no_other_names():
    assert set(ps.theory.__all__) <= set(dir(ps.theory))
    with pytest.raises(AttributeError, match=r"'polyscale\.theory' has no attribute 'frame'"):
        ps.theory.frame  # noqa: B018


def test_captured_layers_come_in_the_order_of_their_calls_with_all_arguments():
    layers = torch.nn.Sequential(random_layer(), random_layer())
    x = draw(1, 5, 16)
    (first, given), (second, _) = ps.theory.capture(layers, x)
    assert (first, second) == (layers[0], layers[1])
    assert torch.equal(given["x"], x)
    assert {"key_padding_mask", "cu_seqlens"} <= set(given)
    with pytest.raises(ValueError, match="model must have HKTAttention or HSAAttention layers"):
        ps.theory.capture(torch.nn.Linear(2, 2), x)
