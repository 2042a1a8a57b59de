import pytest

from polyscale.data.tasks import task_options
from reproduction.hsa import HSAStudy
from reproduction.hsa.plan import FLAT_TOKENS, PRESETS, RECORDS


@pytest.mark.parametrize("preset", PRESETS)
def test_every_variant_runs_with_three_seeds_under_one_budget(preset):
    planned = HSAStudy().plan(preset)
    assert len({(one.table, one.config.name, one.config.seed) for one in planned}) == len(planned)
    for table in {one.table for one in planned}:
        configs = [one.config for one in planned if one.table == table]
        for name in {config.name for config in configs}:
            assert [c.seed for c in configs if c.name == name] == [0, 1, 2]
        assert len({config.training for config in configs}) == 1
        varied = ("hsa-columns", "fsa-tree-pooling", "hsa-tree-pooling")
        bodies = [c.model_options for c in configs if c.name not in varied]
        assert all(body == bodies[0] for body in bodies)


@pytest.mark.parametrize("preset", PRESETS)
def test_flat_attention_reads_512_words_and_trees_all_of_them(preset):
    for one in HSAStudy().plan(preset):
        if one.table == RECORDS:
            continue
        cut = one.config.task_options.get("max_tokens")
        flat = one.config.model == "fsa"
        assert cut == (FLAT_TOKENS if flat else None)


def test_variants_of_a_table_differ_in_what_is_asked_and_nothing_else():
    varied = {"max_tokens", "tree", "fields"}
    for table in {one.table for one in HSAStudy().plan("cpu")}:
        fixed = [
            {k: v for k, v in one.config.task_options.items() if k not in varied}
            for one in HSAStudy().plan("cpu")
            if one.table == table
        ]
        assert all(options == fixed[0] for options in fixed)
        assert "embedding" in fixed[0]


def test_options_are_those_of_the_tasks():
    for one in HSAStudy().plan("paper"):
        assert set(one.config.task_options) <= set(task_options(one.config.task))


def test_the_layer_is_the_paper_s():
    for one in HSAStudy().plan("cpu"):
        options = one.config.model_options
        assert (options["num_hidden_layers"], options["num_attention_heads"]) == (1, 3)
        assert options["hidden_size"] == 126


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="preset must be one of 'cpu', 'paper', got 'gpu'"):
        HSAStudy().plan("gpu")
