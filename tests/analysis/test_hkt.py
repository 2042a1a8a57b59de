"""The analysis of HKT models: every option, odd inputs, and figures that are those of the parts."""

import json

import pytest
import torch

import polyscale as ps
from polyscale.analysis import analyze_hkt, analyze_snapshots
from polyscale.theory import level_scores, split
from polyscale.theory.error import analyse_levels
from polyscale.theory.levels import LEVELS
from tests.analysis.properties import assert_sound
from tests.theory.helpers import OPTIONS, draw, option_name, random_layer, randomise

every_option = pytest.mark.parametrize("options", OPTIONS, ids=option_name)


def random_model(seed=0, **options):
    settings = {"positions": "rotary" if options.pop("rotary", False) else "learned"} | options
    if "level_weights" in settings:
        settings["level_weights"] = list(settings["level_weights"])
    settings.pop("bias", None)  # a choice of the layer alone
    config = ps.HKTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        levels=3,
        attention_impl="reference",
        **settings,
    )
    return randomise(ps.HKTForSequenceClassification(config), 0.3, seed)


@every_option
def test_models_with_every_option_give_a_whole_analysis(options):
    model = random_model(**options)
    ids = torch.randint(0, 259, (3, 17))
    mask = torch.ones(3, 17, dtype=torch.int64)
    mask[0, :4] = 0  # left
    mask[1, 10:] = 0  # right
    found = analyze_hkt(model, {"input_ids": ids, "attention_mask": mask})
    assert_sound(found)
    meta = found["meta"]
    assert (meta["kind"], meta["layers"], meta["heads"], meta["levels"]) == ("hkt", 2, 2, 3)
    assert (meta["length"], meta["rows_used"]) == (13, 13 + 10 + 17)
    forms = 2 * 2 * (1 if options.get("shared_projections", True) else 3)
    assert len(found["kernel"]["forms"]) == forms
    if options.get("kernel") == "psd":
        assert all(one["psd"] for one in found["kernel"]["forms"] + found["kernel"]["scores"])
    assert len(found["kernel"]["scores"]) == len(found["symmetry"]["parts"]) == 2 * 2 * 4
    alone = options.get("level_weights") == (0.0, 0.0, 1.0)
    used = {row["levels_used"] for row in found["error"]["rows"]}
    assert used == set(range(3 if alone else 1, LEVELS + 1))
    assert len(found["attention"]) == 2 * 2 * 4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("levels", [1, 3, 7])
def test_short_sequences_and_any_number_of_levels(length, levels, causal):
    layer = random_layer(levels, causal=causal)
    found = analyze_hkt(layer, draw(2, length, 16))
    assert_sound(found)
    assert found["meta"]["levels"] == levels
    assert {row["levels_used"] for row in found["error"]["rows"]} == set(
        range(1, max(levels, 6) + 1)
    )


def test_error_rows_are_the_means_of_the_decomposition():
    layer = random_layer()
    x = draw(2, 11, 16)
    rows = analyze_hkt(layer, x)["error"]["rows"]
    for row in rows:
        parts = [
            analyse_levels(level_scores(layer, one, 6), row["levels_used"]).parts(row["stride"])
            for one in x
        ]
        for name in ("kl", "resolution", "drift", "non_gaussian", "total_variation"):
            mean = torch.cat([getattr(part, name)[row["head"]] for part in parts]).mean().item()
            assert row[name] == pytest.approx(mean, rel=1e-5, abs=1e-12)
        total = row["resolution"] + row["drift"] + row["non_gaussian"]
        assert total == pytest.approx(row["kl"], rel=1e-4, abs=1e-9)
    strides = analyze_hkt(layer, x)["error"]["strides"]
    assert {row["stride"] for row in strides} == {1, 2, 4, 8, 16, 32}
    assert {row["levels_used"] for row in strides} == {3}


def test_symmetry_shares_are_those_of_the_energy_of_all_examples():
    layer = random_layer()
    x = torch.cat((draw(1, 12, 16), 3 * draw(1, 12, 16, seed=1)))
    for part in analyze_hkt(layer, x)["symmetry"]["parts"]:
        found = [level_scores(layer, one) for one in x]
        level = part["level"]
        scores = [one.merged(3) if level == "merged" else one.scores[level] for one in found]
        both = torch.stack([split(score[part["head"]])[0].square().sum() for score in scores])
        energy = torch.stack([score[part["head"]].square().sum() for score in scores])
        assert part["reciprocal"] == pytest.approx((both.sum() / energy.sum()).item(), rel=1e-5)
        assert part["energy"] == pytest.approx(energy.sum().item(), rel=1e-5)


def test_shares_of_the_levels_add_up_to_the_gaussian_part():
    error = analyze_hkt(random_layer(), draw(1, 12, 16))["error"]
    for head in range(2):
        shares = [one["gaussian"] for one in error["levels"] if one["head"] == head]
        row = next(r for r in error["rows"] if r["head"] == head and r["levels_used"] == 3)
        assert sum(shares) == pytest.approx(row["resolution"] + row["drift"], rel=1e-4)


def test_padding_on_any_side_changes_nothing():
    model = random_model()
    ids = torch.randint(3, 259, (1, 9))
    plain = analyze_hkt(model, {"input_ids": ids})
    for left, right in ((4, 0), (0, 3), (2, 5)):
        padded = torch.nn.functional.pad(ids, (left, right))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
        found = analyze_hkt(model, {"input_ids": padded, "attention_mask": mask})
        for name in ("kernel", "symmetry", "error", "normality", "levels"):
            assert_close(found[name], plain[name])


def assert_close(one, other):
    """Numbers to 1e-3 (the model runs in float32, padded or not), all else equal."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_close(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_close(left, right)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    else:
        assert one == other


def test_a_layer_with_a_padding_mask():
    layer = random_layer()
    x = draw(2, 8, 16)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, :3] = True
    found = analyze_hkt(layer, {"x": x, "key_padding_mask": mask})
    alone = analyze_hkt(layer, (x[:1, 3:],))
    assert found["kernel"] == alone["kernel"]
    assert found["meta"]["length"] == 5


def test_the_model_is_left_as_it_was():
    model = random_model().train()
    model.model.blocks[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    analyze_hkt(model, torch.randint(0, 259, (1, 5)))
    assert model.training
    assert not model.model.blocks[0].training
    assert model.model.blocks[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(len(module._forward_pre_hooks) for module in model.modules())


def test_long_sequences_are_cut_and_the_notes_say_so():
    found = analyze_hkt(random_layer(heads=1), draw(3, 300, 16), max_length=200, examples=2)
    notes = " ".join(found["meta"]["notes"])
    assert "first 200 tokens (the example has 300)" in notes
    assert "2 of the batch's 3 entries" in notes
    assert "256 of 400 query rows" in notes
    assert found["meta"]["length"] == 200
    assert found["meta"]["rows_used"] == 256
    shown = found["attention"][0]
    assert shown["pooled_from"] == 200
    assert len(shown["map"]) == 128
    assert_sound(found)


def test_many_maps_are_made_smaller_and_the_notes_say_so():
    found = analyze_hkt(random_layer(heads=8), draw(1, 130, 16))
    numbers = sum(len(one["map"]) ** 2 for one in found["attention"])
    numbers += sum(2 * len(one["symmetric"]) ** 2 for one in found["symmetry"]["maps"])
    assert numbers <= 600_000
    cells = len(found["attention"][0]["map"])
    assert f"averaged to {cells} x {cells} cells" in " ".join(found["meta"]["notes"])
    assert not analyze_hkt(random_layer(), draw(1, 9, 16), maps=False)["attention"]


def test_attention_maps_are_the_attention():
    layer = random_layer()
    x = draw(1, 10, 16)
    found = analyze_hkt(layer, x)
    with torch.no_grad():
        _, details = layer(x, return_details=True)
    for one in found["attention"]:
        shown = torch.tensor(one["map"], dtype=torch.float64)
        assert shown.sum(-1).tolist() == pytest.approx([1] * 10, abs=2e-3)
        assert one["pooled_from"] is None
        if one["level"] == "merged":
            expected = details.attention[0, one["head"]]
            torch.testing.assert_close(shown, expected, atol=1e-12, rtol=1e-3)


def test_tokens_and_text_are_carried_along():
    model = random_model()
    ids = torch.randint(0, 259, (1, 6))
    mask = torch.tensor([[0, 1, 1, 1, 1, 0]])
    batch = {"input_ids": ids, "attention_mask": mask}
    found = analyze_hkt(model, batch, tokens=list("-abcd-"), text="abcd", title="T")
    assert found["meta"]["tokens"] == list("abcd")
    assert (found["meta"]["text"], found["meta"]["title"]) == ("abcd", "T")
    assert analyze_hkt(model, batch, tokens=list("abcd"))["meta"]["tokens"] == list("abcd")
    long = analyze_hkt(random_layer(heads=1), draw(1, 129, 16), tokens=["x"] * 129)
    assert long["meta"]["tokens"] is None
    assert "Tokens are not listed" in " ".join(long["meta"]["notes"])


def test_summaries_are_sentences_about_this_model():
    broken = " ".join(analyze_hkt(random_model(), torch.randint(0, 259, (1, 30)))["summary"])
    assert "4 of 4 bilinear forms break the PSD condition" in broken
    assert "Score products cost" in broken
    kept = analyze_hkt(random_model(kernel="psd"), torch.randint(0, 259, (1, 30)))["summary"]
    assert any(line.startswith("The PSD condition holds for all 4") for line in kept)


def test_snapshots_give_normality_over_training():
    models = [(step, random_model(seed)) for seed, step in enumerate((200, 0, 100))]
    batch = {"input_ids": torch.randint(0, 259, (4, 32))}
    found = analyze_snapshots(models, batch)
    assert_sound(found)
    history = found["normality"]["over_training"]
    assert [entry["step"] for entry in history] == [0] * 6 + [100] * 6 + [200] * 6
    assert {(entry["layer"], entry["level"]) for entry in history} == {
        (layer, level) for layer in range(2) for level in range(3)
    }
    last = analyze_hkt(models[0][1], batch)
    assert found["kernel"] == last["kernel"]
    mean = sum(
        one["skewness"]
        for one in last["normality"]["levels"]
        if (one["layer"], one["level"]) == (0, 0)
    )
    assert history[12]["skewness"] == pytest.approx(mean / 2)


def test_an_analysis_survives_json():
    found = analyze_hkt(random_layer(), draw(1, 6, 16))
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_bad_input_is_named():
    layer = random_layer()
    x = draw(1, 6, 16)
    with pytest.raises(ValueError, match="model must have HKTAttention layers, got Linear"):
        analyze_hkt(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="example must be from 0 to 0, got 3"):
        analyze_hkt(layer, x, example=3)
    with pytest.raises(ValueError, match="levels must be an integer of at least 1, got 0"):
        analyze_hkt(layer, x, levels=0)
    with pytest.raises(ValueError, match="only padding"):
        analyze_hkt(layer, {"x": x, "key_padding_mask": torch.ones(1, 6, dtype=torch.bool)})
    with pytest.raises(ValueError, match="must not be packed"):
        analyze_hkt(layer, {"x": x, "cu_seqlens": torch.tensor([0, 2, 6])})
    with pytest.raises(ValueError, match="tokens must name each of the 6 tokens"):
        analyze_hkt(layer, x, tokens=["a"])
    with pytest.raises(TypeError, match="batch must be a tensor"):
        analyze_hkt(layer, "text")
    with pytest.raises(ValueError, match="snapshots must hold at least one"):
        analyze_snapshots([], x)
    twice = torch.nn.Sequential(layer, layer)
    with pytest.raises(ValueError, match="once per batch"):
        analyze_hkt(twice, x)
    mixed = torch.nn.Sequential(layer, random_layer(levels=2))
    with pytest.raises(ValueError, match="layers of one kind"):
        analyze_hkt(mixed, x)
