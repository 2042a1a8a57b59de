"""Blocks before an injection give again what they gave, and only the rest runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from polyscale.data.splits import TokenSplit, collate
from reproduction.zero_shot import measures
from reproduction.zero_shot.injections import Injection
from reproduction.zero_shot.measures import injected, predict
from reproduction.zero_shot.pretrained import pretrained_model
from reproduction.zero_shot.replay import BlockOutputs, blocks


def test_replayed_predictions_are_those_of_the_whole_model(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "BATCH_TOKENS", 64)
    torch.manual_seed(3)
    source = pretrained_model(str(model_folder))
    model = source.classifier(4).double().eval()
    for block in blocks(model):
        for weight in block.attention.parameters():  # so large that attention decides
            torch.nn.init.normal_(weight)
    sizes = torch.randint(3, 30, (40,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    split = TokenSplit(
        torch.randint(4, 25, (int(sizes.sum()),)), offsets, torch.zeros(40), decode=str
    )
    known = BlockOutputs()
    original = predict(model, split, collate, known)
    assert original.tolist() == predict(model, split, collate).tolist()
    ran: list[int] = []
    for number, block in enumerate(blocks(model)):
        block.attention.register_forward_hook(lambda *_, number=number: ran.append(number))
    with injected(model, Injection((1,), (2, 2), "blocks", ()), source.tokenizer()):
        whole = predict(model, split, collate)
        assert set(ran) == {0, 1}
        ran.clear()
        replayed = predict(model, split, collate, known, first=1)
        assert set(ran) == {1}
    assert replayed.tolist() == whole.tolist()
    assert whole.tolist() != original.tolist()
    ran.clear()
    predict(model, split, collate)  # and then all of it runs again
    assert set(ran) == {0, 1}


def test_blocks_are_found_in_decoders_too() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=3, n_head=2, n_positions=8))
    assert blocks(model) == list(model.transformer.h)


def test_a_model_without_a_list_of_blocks_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2, n_positions=8))
    model.transformer.h = torch.nn.Sequential(*model.transformer.h)
    with pytest.raises(ValueError, match=r"must have an nn\.ModuleList .* got GPT2LMHeadModel"):
        blocks(model)
