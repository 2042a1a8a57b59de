import itertools
import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    ByT5Tokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)

import polyscale as ps
from tests.layers.test_hkt import OPTIONS

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def make(model_class, **options):
    """A small model none of whose weights is at its starting value."""
    model = model_class(ps.HKTConfig(**{**SMALL, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def as_config(options):
    """Options of the layer as fields of the configuration."""
    names = {"impl": "attention_impl"}
    fields = {names.get(name, name): value for name, value in options.items()}
    if fields.pop("rotary", False):
        fields["positions"] = "rotary"
    return fields


every_option = pytest.mark.parametrize(
    "options", [as_config(options) for options in OPTIONS.values()], ids=OPTIONS.keys()
)


def largest(x):
    return x.detach().abs().max().item()


def tokens(*shape):
    return torch.randint(3, 40, shape)


def left_padded(ids, lengths):
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, 0), mask.long()


@every_option
def test_no_token_of_the_whole_model_depends_on_a_later_one(options):
    model = make(ps.HKTModel, **options).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    output = model(inputs_embeds=x).last_hidden_state
    for t in range(9):
        cotangent = torch.zeros_like(output)
        cotangent[:, t] = torch.randn(16, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(output, x, cotangent, retain_graph=True)
        assert torch.count_nonzero(gradient[:, t + 1 :]) == 0


@every_option
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_any_length_changes_no_real_token(options, side):
    model = make(ps.HKTModel, causal=side == "left", **options)
    ids = tokens(2, 9)
    expected = model(ids).last_hidden_state
    for amount in (1, 2, 3, 4, 7, 16, 17):
        junk, ones, zeros = tokens(2, amount), torch.ones(2, 9), torch.zeros(2, amount)
        order = (junk, ids) if side == "left" else (ids, junk)
        mask_order = (zeros, ones) if side == "left" else (ones, zeros)
        mask = torch.cat(mask_order, 1).long()
        output = model(torch.cat(order, 1), mask).last_hidden_state
        assert largest(output[mask == 1].view(2, 9, 16) - expected) <= 1e-5
        assert torch.count_nonzero(output[mask == 0]) == 0


def test_each_row_alone_is_the_row_in_the_batch():
    model = make(ps.HKTForSequenceClassification, num_labels=3)
    ids, mask = left_padded(tokens(3, 12), [5, 12, 1])
    together = model(ids, mask).logits
    for row, length in enumerate([5, 12, 1]):
        assert largest(together[row] - model(ids[row : row + 1, -length:]).logits[0]) <= 1e-5


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q"])
def test_packed_sequences_are_what_each_gives_alone(pooling, name):
    model = make(ps.HKTForSequenceClassification, num_labels=3, pooling=pooling)
    ids = tokens(1, 14)
    bounds = torch.tensor([0, 5, 6, 14])
    together = model(ids, **{name: bounds}).logits
    alone = [model(ids[:, a:b]).logits for a, b in itertools.pairwise(bounds)]
    assert largest(together - torch.cat(alone)) <= 1e-5


def test_no_loss_crosses_from_one_packed_sequence_to_the_next():
    model = make(ps.HKTForCausalLM)
    ids = tokens(1, 14)
    bounds = torch.tensor([0, 5, 14])
    packed = model(ids, labels=ids, cu_seqlens=bounds).loss
    alone = [model(ids[:, a:b], labels=ids[:, a:b]).loss for a, b in ((0, 5), (5, 14))]
    assert abs(packed - (4 * alone[0] + 8 * alone[1]) / 12) < 1e-5


class TestGeneration:
    @pytest.mark.parametrize(
        "options", [{}, *(as_config(OPTIONS[n]) for n in ("together", "wide"))]
    )
    @pytest.mark.parametrize("length", range(1, 21))
    def test_cached_logits_equal_the_full_forward_for_every_prompt_length(self, length, options):
        model = make(ps.HKTForCausalLM, **options)
        ids = tokens(1, length + 40)
        full = model(ids, use_cache=False).logits
        output = model(ids[:, :length], use_cache=True)
        assert largest(output.logits - full[:, :length]) <= 1e-4
        for t in range(length, length + 40):
            output = model(ids[:, t : t + 1], past_key_values=output.past_key_values)
            assert largest(output.logits[:, 0] - full[:, t]) <= 1e-4

    @pytest.mark.parametrize("how", ["greedy", "sampling", "beams"])
    def test_the_cache_changes_nothing_that_generate_writes(self, how):
        model = make(ps.HKTForCausalLM)
        ids, mask = left_padded(tokens(4, 20), [1, 7, 20, 12])
        options = {
            "greedy": {"do_sample": False},
            "sampling": {"do_sample": True, "top_k": 10},
            "beams": {"do_sample": False, "num_beams": 3},
        }[how]
        written = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            written.append(
                model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=40,
                    eos_token_id=None,
                    use_cache=use_cache,
                    **options,
                )
            )
        assert torch.equal(*written)

    def test_a_prompt_in_a_padded_batch_goes_on_as_it_does_alone(self):
        model = make(ps.HKTForCausalLM)
        lengths = list(range(1, 21))
        ids, mask = left_padded(tokens(20, 20), lengths)
        together = model.generate(
            ids, attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=None
        )
        for row, length in enumerate(lengths):
            alone = model.generate(
                ids[row : row + 1, -length:],
                attention_mask=mask[row : row + 1, -length:],
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
            )
            assert torch.equal(together[row, 20:], alone[0, length:])

    def test_rows_that_end_early_do_not_disturb_the_others(self):
        model = make(ps.HKTForCausalLM)
        ids, mask = left_padded(tokens(3, 8), [3, 8, 5])
        free = model.generate(
            ids, attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=None
        )
        stop = int(free[0, 10])  # something the first row writes early
        ended = model.generate(
            ids, attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=stop
        )
        for row in range(3):
            hits = (free[row, 8:] == stop).nonzero()
            end = 8 + (int(hits[0]) + 1 if len(hits) else 30)
            assert torch.equal(ended[row, :end], free[row, :end])

    def test_a_cache_of_another_kind_is_refused(self):
        from transformers import DynamicCache

        model = make(ps.HKTForCausalLM)
        with pytest.raises(TypeError, match=r"past_key_values must be a DynamicCache\(config"):
            model(tokens(1, 3), past_key_values=DynamicCache())

    def test_a_cache_cannot_be_cropped_or_updated_from_outside(self):
        model = make(ps.HKTForCausalLM)
        cache = model(tokens(1, 3), use_cache=True).past_key_values
        assert cache.get_seq_length() == 3
        with pytest.raises(NotImplementedError, match="cannot be cropped"):
            cache.layers[0].crop(-1)
        with pytest.raises(NotImplementedError, match="filled by its attention layer"):
            cache.layers[0].update(torch.zeros(1), torch.zeros(1))
        cache.reset()
        assert cache.get_seq_length() == 0


class TestSavingAndLoading:
    @every_option
    def test_a_model_comes_back_bit_for_bit(self, options, tmp_path):
        model = make(ps.HKTForSequenceClassification, num_labels=3, **options)
        model.save_pretrained(tmp_path)
        assert (tmp_path / "model.safetensors").exists()
        assert not list(tmp_path.glob("*.bin"))
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        assert type(loaded) is ps.HKTForSequenceClassification
        saved_state, loaded_state = model.state_dict(), loaded.state_dict()
        assert saved_state.keys() == loaded_state.keys()
        assert all(torch.equal(saved_state[name], loaded_state[name]) for name in saved_state)
        ids = tokens(2, 9)
        assert torch.equal(model(ids).logits, loaded(ids).logits)

    @pytest.mark.parametrize(
        ("auto", "model_class"),
        [
            (AutoModel, "HKTModel"),
            (AutoModelForCausalLM, "HKTForCausalLM"),
            (AutoModelForTokenClassification, "HKTForTokenClassification"),
        ],
    )
    def test_the_auto_classes_know_the_models(self, auto, model_class, tmp_path):
        model = make(getattr(ps, model_class))
        model.save_pretrained(tmp_path)
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded).__name__ == model_class
        ids = tokens(1, 5)
        assert torch.equal(model(ids)[0], loaded(ids)[0])
        assert type(AutoConfig.from_pretrained(tmp_path)) is ps.HKTConfig

    def test_a_causal_model_keeps_its_tied_head(self, tmp_path):
        model = make(ps.HKTForCausalLM)
        assert model.lm_head.weight is model.model.embeddings.weight
        model.save_pretrained(tmp_path)
        loaded = ps.HKTForCausalLM.from_pretrained(tmp_path)
        assert loaded.lm_head.weight is loaded.model.embeddings.weight

    def test_a_truncated_file_is_refused(self, tmp_path):
        make(ps.HKTModel).save_pretrained(tmp_path)
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(Exception, match=r"(?i)safetensor|incomplete|header"):
            ps.HKTModel.from_pretrained(tmp_path)

    def test_the_configuration_survives_json(self, tmp_path):
        config = ps.HKTConfig(**SMALL, levels=2, level_weights=[0.25, 0.75], kernel="psd")
        config.save_pretrained(tmp_path)
        stored = json.loads((tmp_path / "config.json").read_text())
        assert stored["model_type"] == "hkt"
        loaded = ps.HKTConfig.from_pretrained(tmp_path)
        assert (loaded.levels, loaded.level_weights, loaded.kernel) == (2, [0.25, 0.75], "psd")


class TestTraining:
    class Rows(torch.utils.data.Dataset):
        """Byte texts of unequal length, and whether they hold the byte 'a'."""

        def __init__(self, causal):
            tokenizer = ByT5Tokenizer(extra_ids=0)
            texts = ["aaaa", "b", "ca", "dbeeb", "a", "fffffff", "gah", "ii"]
            encoded = tokenizer(texts, padding=True, return_tensors="pt")
            self.rows = [
                {
                    "input_ids": ids,
                    "attention_mask": mask,
                    "labels": ids.masked_fill(mask == 0, -100) if causal else int("a" in text),
                }
                for ids, mask, text in zip(
                    encoded["input_ids"], encoded["attention_mask"], texts, strict=True
                )
            ]

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            return self.rows[index]

    def train(self, model, path, causal, **options):
        arguments = TrainingArguments(
            output_dir=str(path),
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            seed=0,
            **options,
        )
        rows = self.Rows(causal)
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0
        assert trainer.predict(rows).predictions.shape[0] == len(rows)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def test_the_trainer_learns_a_small_task(self, tmp_path):
        model = make(ps.HKTForSequenceClassification, vocab_size=259, num_labels=2)
        losses = self.train(
            model, tmp_path, False, per_device_train_batch_size=8, max_steps=40, learning_rate=1e-2
        )
        assert losses[-1] < 0.2 < losses[0]

    def test_accumulated_batches_weigh_every_token_alike(self, tmp_path):
        """So the number of tokens in the batch has reached the loss."""
        start = make(ps.HKTForCausalLM, vocab_size=259).state_dict()
        ends = []
        for size, steps in ((8, 1), (2, 4)):
            model = make(ps.HKTForCausalLM, vocab_size=259)
            model.load_state_dict(start)
            self.train(
                model,
                tmp_path,
                True,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=steps,
                max_steps=2,
                learning_rate=1e-2,
                optim="sgd",
            )
            ends.append(model.state_dict())
        moved = max(largest(ends[0][name] - start[name]) for name in start)
        apart = max(largest(ends[0][name] - ends[1][name]) for name in start)
        assert moved > 1e-3
        assert apart < 1e-5

    def test_gradient_checkpointing_gives_the_same_gradients(self):
        model = make(ps.HKTForCausalLM).train()
        ids, mask = left_padded(tokens(2, 12), [12, 5])
        gradients = []
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
            model.zero_grad()
            model(ids, mask, labels=ids).loss.backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))

    def test_bfloat16_autocast_trains_close_to_float32(self):
        model = make(ps.HKTForSequenceClassification, num_labels=3).train()
        ids, mask = left_padded(tokens(4, 12), [12, 5, 1, 8])
        labels = torch.tensor([0, 1, 2, 0])
        exact = model(ids, mask, labels=labels).loss
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, mask, labels=labels).loss
        loss.backward()
        assert abs(loss - exact) < 0.05 * exact
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)

    def test_the_whole_model_compiles_without_a_graph_break(self):
        model = make(ps.HKTForSequenceClassification, num_labels=3, num_hidden_layers=1)
        ids, mask = left_padded(tokens(2, 12), [12, 5])
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        output = compiled(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 1]))
        output.loss.backward()
        assert largest(output.logits - model(ids, mask).logits) < 1e-5


def test_the_pipeline_classifies_text_by_bytes():
    tokenizer = ByT5Tokenizer(extra_ids=0)
    model = make(ps.HKTForSequenceClassification, vocab_size=259, num_labels=2)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
    texts = ["a short one", "a rather longer one, with ü and €"]
    results = classify(texts, batch_size=2)
    for text, result in zip(texts, results, strict=True):
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        assert result["label"] == model.config.id2label[int(logits.argmax())]
        assert abs(result["score"] - logits.softmax(-1).max().item()) < 1e-4


@pytest.mark.parametrize("channels", [1, 3])
def test_continuous_inputs_take_the_place_of_tokens(channels):
    model = make(ps.HKTForSequenceClassification, input_channels=channels, num_labels=2)
    assert model.main_input_name == "input_values"
    pixels = torch.rand(2, 12, channels)
    output = model(input_values=pixels, labels=torch.tensor([0, 1]))
    assert output.logits.shape == (2, 2)
    output.loss.backward()
    if channels == 1:
        assert torch.equal(model(input_values=pixels[..., 0]).logits, output.logits)


def test_hidden_states_and_attentions_come_on_request():
    model = make(ps.HKTModel)
    ids, mask = left_padded(tokens(2, 8), [8, 3])
    plain = model(ids, mask)
    output = model(ids, mask, output_hidden_states=True, output_attentions=True)
    assert plain.hidden_states is None
    assert plain.attentions is None
    assert len(output.hidden_states) == 3
    assert torch.equal(output.hidden_states[-1], plain.last_hidden_state)
    assert [a.shape for a in output.attentions] == [(2, 2, 8, 8)] * 2
    assert torch.allclose(output.attentions[0].sum(-1), mask.float()[:, None].expand(2, 2, 8))
    assert isinstance(model(ids, return_dict=False), tuple)


def test_token_classification_gives_a_class_for_every_token():
    model = make(ps.HKTForTokenClassification, num_labels=5, causal=False)
    labels = torch.randint(0, 5, (2, 7))
    labels[0, 3:] = -100
    output = model(tokens(2, 7), labels=labels)
    assert output.logits.shape == (2, 7, 5)
    kept = labels != -100
    expected = torch.nn.functional.cross_entropy(output.logits[kept], labels[kept])
    assert abs(output.loss - expected) < 1e-6


def test_level_weights_of_every_block_can_be_read():
    weights = make(ps.HKTModel, levels=4).level_weights()
    assert [w.shape for w in weights] == [(2, 4), (2, 4)]


def test_one_level_is_the_twin_with_the_same_code_around_it():
    twin, hkt = make(ps.HKTModel, levels=1), make(ps.HKTModel, levels=3)
    common = {n for n, _ in hkt.named_parameters()} & {n for n, _ in twin.named_parameters()}
    extra = {n for n, _ in hkt.named_parameters()} - common
    assert extra
    assert all("downsamplers" in name for name in extra)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 0}, "levels must be an integer of at least 1"),
        ({"hidden_size": 15}, "hidden_size must be a multiple"),
        ({"positions": "sinus"}, "positions must be one of"),
        ({"pooling": "max"}, "pooling must be one of"),
        ({"kernel": "rbf"}, "kernel must be one of"),
        ({"attention_impl": "magic"}, "impl must be one of"),
        ({"level_weights": [0.5, 0.5]}, "level_weights must be 3 numbers"),
        ({"dropout": 1.0}, "dropout"),
        ({"input_channels": 0}, "input_channels"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"levels": "three"}, "levels"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(options, message):
    with pytest.raises(Exception, match=message):
        ps.HKTConfig(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass either input_ids"),
        ({"input_ids": tokens(1, 4), "inputs_embeds": torch.zeros(1, 4, 16)}, "pass either"),
        ({"input_values": torch.zeros(1, 4, 1)}, "pass either input_ids"),
        ({"input_ids": tokens(4)}, "input_ids must have shape"),
        ({"input_ids": tokens(1, 0)}, "input_ids must have shape"),
        ({"input_ids": tokens(1, 65)}, "at most max_position_embeddings=64 tokens, got 65"),
        ({"input_ids": tokens(1, 4), "attention_mask": torch.ones(1, 5)}, "attention_mask"),
        ({"input_ids": tokens(1, 4), "cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens"),
        (
            {"input_ids": tokens(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])},
            "position_ids must count",
        ),
        ({"input_ids": tokens(1, 4), "token_type_ids": torch.ones(1, 4)}, "token_type_ids"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(ps.HKTModel)(**arguments)


def test_position_ids_that_say_what_the_mask_says_are_welcome():
    model = make(ps.HKTModel)
    ids, mask = left_padded(tokens(2, 6), [6, 3])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(ids, mask, position_ids=positions).last_hidden_state
    assert torch.equal(output, model(ids, mask).last_hidden_state)


def test_long_padding_does_not_count_against_the_longest_position():
    model = make(ps.HKTModel)
    ids, mask = left_padded(tokens(1, 100), [64])
    assert largest(model(ids, mask).last_hidden_state[:, 36:] - model(ids[:, 36:])[0]) <= 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [({"causal": False}, "causal=True"), ({"input_channels": 1}, "token ids")],
)
def test_a_language_model_must_be_causal_over_tokens(options, message):
    with pytest.raises(ValueError, match=message):
        ps.HKTForCausalLM(ps.HKTConfig(**SMALL, **options))


def test_a_model_starts_locally_where_its_configuration_says_so(tmp_path):
    config = ps.HKTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        positions="rotary",
        local_start=1.5,
    )
    model = ps.HKTModel(config)
    for block in model.blocks:
        for projection in (*block.attention.q_proj, *block.attention.k_proj):
            assert (projection.bias == 1.5).all()
            torch.nn.init.zeros_(projection.bias)
        assert (block.attention.v_proj.bias == 0).all()
    model.save_pretrained(tmp_path)
    loaded = ps.HKTModel.from_pretrained(tmp_path)
    assert (loaded.blocks[0].attention.q_proj[0].bias == 0).all()  # what was trained stays
    with pytest.raises(Exception, match="local_start must be 0 without rotary"):
        ps.HKTConfig(local_start=1.0)
