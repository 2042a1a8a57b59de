"""What is measured: accuracies with their errors, certificates, embeddings, ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from polyscale.data.splits import TokenSplit, collate
from polyscale.inject import attention_flops, injected_layers
from reproduction.zero_shot import measures
from reproduction.zero_shot.embeddings import agreement, embed, spearman
from reproduction.zero_shot.injections import Injection
from reproduction.zero_shot.measures import as_text, certify, compare, injected, predict
from reproduction.zero_shot.pretrained import pretrained_model

TEXTS = [
    "The film was grand. A plot of the cast was dull and cold!",
    "A warm song.",
    "Fine ending with the cast and the scene. Poor plot. The film was grey!",
]


def test_points_lost_and_their_error_are_paired() -> None:
    labels = torch.tensor([0, 0, 1, 1, 0])
    before = torch.tensor([0, 0, 1, 0, 1])  # 3 of 5
    after = torch.tensor([0, 1, 1, 1, 1])  # 3 of 5: one lost, one won
    found = compare(before, after, labels)
    assert found["lost"] == 0.0
    assert found["accuracy_before"] == pytest.approx(60)
    assert found["accuracy_error"] == pytest.approx(100 * math.sqrt(0.6 * 0.4 / 5))
    # Differences 0, 1, 0, -1, 0: variance 2 / 4.
    assert found["lost_error"] == pytest.approx(100 * math.sqrt(0.5 / 5))
    assert found["agreement"] == pytest.approx(60)


def test_a_lost_answer_counts_as_a_loss_not_as_a_gain() -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    assert compare(labels, torch.tensor([1, 0, 0, 0]), labels)["lost"] == 25


def test_comparing_no_text_is_refused() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="labels must have at least one text"):
        compare(none, none, none)


def test_more_than_ten_classes_do_not_fit_a_digit() -> None:
    with pytest.raises(ValueError, match="must be classes 0 to 9, got 10"):
        as_text(torch.tensor([10]))


def test_predictions_do_not_depend_on_the_batches(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    model = pretrained_model(str(model_folder)).classifier(4).double().eval()
    sizes = torch.randint(3, 30, (20,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = torch.randint(4, 25, (int(sizes.sum()),))
    split = TokenSplit(ids, offsets, torch.zeros(20), decode=str)
    alone = [int(model(input_ids=split[at]["input_ids"][None]).logits.argmax()) for at in range(20)]
    assert len(set(alone)) > 1
    for tokens in (1, 64, 4_096):
        monkeypatch.setattr(measures, "BATCH_TOKENS", tokens)
        assert predict(model, split, collate).tolist() == alone


def test_a_tree_of_one_family_has_no_kl_and_others_cost_what_is_counted(
    model_folder: Path,
) -> None:
    source = pretrained_model(str(model_folder))
    model, tokenizer = source.encoder().double(), source.tokenizer()
    kinds = [Injection((0,), (64,), "columns", ()), Injection((0,), (2, 4), "blocks")]
    flat, windows = certify(model, kinds, TEXTS[:1], tokenizer, 64)
    assert flat["kl"] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert min(windows["kl"]) > 1e-4
    length = len(tokenizer(TEXTS[0])["input_ids"])
    assert windows["flops_before"] == attention_flops(length, 2, 8).total
    after = attention_flops(length, 2, 8, (2, 4), "blocks", sinks=2).total
    assert windows["flops_after"] == after
    assert windows["saved"] == pytest.approx(1 - after / windows["flops_before"])


def test_a_model_is_as_before_after_a_measurement_that_fails(model_folder: Path) -> None:
    source = pretrained_model(str(model_folder))
    model = source.encoder()
    seen: list[list[int]] = []

    def fail() -> None:
        with injected(model, Injection((1,), (2, 2), "blocks"), source.tokenizer()):
            seen.append(injected_layers(model))
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert seen == [[1]]
    assert injected_layers(model) == []


def test_embeddings_are_means_over_real_tokens(model_folder: Path) -> None:
    source = pretrained_model(str(model_folder))
    model, tokenizer = source.encoder().double(), source.tokenizer()
    together = embed(model, TEXTS, tokenizer, 64)
    alone = torch.cat([embed(model, [text], tokenizer, 64) for text in sorted(TEXTS, key=len)])
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(3).double())


def test_equal_numbers_share_their_mean_rank() -> None:
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4.
    one, other = torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert spearman(one, other) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_ranks_of_equal_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be constant"):
        spearman(torch.ones(3), torch.randn(3))
    with pytest.raises(ValueError, match="got 1 and 1"):
        spearman(torch.ones(1), torch.ones(1))


def test_turned_embeddings_rank_alike_but_have_another_direction() -> None:
    rows = torch.nn.functional.normalize(torch.randn(8, 4).double(), dim=-1)
    turn, _ = torch.linalg.qr(torch.randn(4, 4).double())
    found = agreement(rows, rows @ turn)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["cosine"] < 0.9
