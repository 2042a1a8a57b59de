import doctest
import importlib
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from matplotlib.figure import Figure

from polyscale.trees import SignalTree
from tests.trees import naive
from tests.trees.strategies import deep_chain, random_parents, trees

# Diagnostics


@given(trees())
def test_dilution_is_the_mean_over_pairs_of_leaves(tree: SignalTree) -> None:
    assert tree.diagnostics().dilution == pytest.approx(naive.dilution(tree), rel=1e-12)


def test_dilution_of_a_batch_is_over_pairs_of_one_tree() -> None:
    parts = [SignalTree.from_parents(random_parents(random.Random(seed))) for seed in range(6)]
    forest = SignalTree.batch(parts)
    assert forest.diagnostics().dilution == pytest.approx(naive.dilution(forest), rel=1e-12)


def test_a_flat_tree_dilutes_nothing_and_costs_what_flat_attention_costs() -> None:
    report = SignalTree.from_windows(50).diagnostics()
    assert (report.dilution, report.cost, report.flat_cost) == (1.0, 2500, 2500)
    assert report.cost_share == 1.0


def test_diagnostics_count_depth_branching_and_one_child_nodes() -> None:
    tree = SignalTree.from_nested([[1], [2, 3, [4]], 5])
    report = tree.diagnostics()
    assert (report.leaves, report.inner_nodes, report.depth, report.trees) == (5, 4, 3, 1)
    assert report.mean_leaf_depth == pytest.approx((2 + 2 + 2 + 3 + 1) / 5)
    assert report.branching_mean == pytest.approx((3 + 1 + 3 + 1) / 4)
    assert report.branching_max == 3
    assert report.one_child_share == 0.5
    assert report.cost == 9 + 1 + 9 + 1
    assert report.as_dict()["cost_share"] == pytest.approx(20 / 25)
    assert "50.0% with one child" in str(report)


def test_a_single_leaf_and_a_long_sequence_have_finite_figures() -> None:
    single = SignalTree.from_windows(1).diagnostics()
    assert (single.dilution, single.cost, single.flat_cost, single.branching_mean) == (1, 0, 1, 0)
    # The sum of cubes, 2.7e19, is beyond int64.
    long = SignalTree.from_windows(3_000_000, (1_500_000,)).diagnostics()
    pairs = 3_000_000 * 2_999_999
    near = 2 * 1_500_000 * 1_499_999
    expected = (near + (pairs - near) * 1_500_000) / pairs
    assert long.dilution == pytest.approx(expected, rel=1e-12)
    assert long.flat_cost == 9 * 10**12


# Outlines


def test_an_outline_shows_names_domains_and_labels() -> None:
    tree = SignalTree.from_records({"title": 2, "tags": {"tag"}})
    assert tree.outline(labels=["big", "house", "new"]).splitlines() == [
        "keyed of 2 (3 leaves)",
        "├─ title: sequence of 2 (2 leaves)",
        "│  ├─ big (title)",
        "│  └─ house (title)",
        "└─ tags: set of 1 (1 leaves)",
        "   └─ new (tags)",
    ]


def test_long_outlines_are_cut_and_say_so() -> None:
    lines = SignalTree.from_windows(1000, (10,)).outline(max_nodes=5).splitlines()
    assert len(lines) == 6
    assert lines[-1] == "... and 1,096 more nodes"
    chain = SignalTree.from_parents(deep_chain(5_000)).outline(max_nodes=3).splitlines()
    assert len(chain) == 4


@given(trees())
def test_a_whole_outline_has_a_line_for_each_node_and_leaves_in_order(tree: SignalTree) -> None:
    lines = tree.outline(max_nodes=1000).splitlines()
    assert len(lines) == tree.num_nodes
    rows = [int(line.rsplit(" ", 1)[1]) for line in lines if "row " in line]
    assert rows == list(range(tree.num_leaves))


def test_outlines_of_batches_show_every_tree_and_labels_may_be_computed() -> None:
    forest = SignalTree.batch([SignalTree.from_windows(1), SignalTree.from_windows(2)])
    lines = forest.outline(labels=lambda row: "\n" * row).splitlines()
    assert lines == ["", "sequence of 2 (2 leaves)", r"├─ '\n'", r"└─ '\n\n'"]


def test_outlines_refuse_labels_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="labels must have one name for each of 2 rows, got 1"):
        SignalTree.from_windows(2).outline(labels=["one"])
    with pytest.raises(ValueError, match=r"max_nodes must be .*, got 0"):
        SignalTree.from_windows(2).outline(max_nodes=0)


# Pictures


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_tree_is_drawn_to_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tree.{suffix}"
    SignalTree.from_windows(9, (3,)).draw(path, labels=[f"word{n}" for n in range(9)])
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") or b"<svg" in data
    assert len(data) > 2_000


def test_leaves_stand_from_left_to_right_and_parents_above_their_middle() -> None:
    axes = SignalTree.from_nested([[1, 2, 3], 4]).draw()
    sequence, leaves = (collection.get_offsets() for collection in axes.collections[1:])
    assert sequence.tolist() == [[1.5, 0.0], [1.0, -1.0]]
    assert sorted(leaves.tolist()) == [[0.0, -2.0], [1.0, -2.0], [2.0, -2.0], [3.0, -1.0]]
    assert [text.get_text() for text in axes.texts] == ["3", "0", "1", "2"]


def test_a_large_tree_is_drawn_by_its_upper_levels() -> None:
    axes = SignalTree.from_windows(100_000, (10, 10, 10, 10)).draw(max_nodes=150)
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["+1,000"] * 100
    assert axes.get_title().endswith("3 of 6 levels")


@given(trees())
def test_any_tree_can_be_drawn(tree: SignalTree) -> None:
    axes = tree.draw(Figure().add_subplot())
    places = [tuple(p) for part in axes.collections[1:] for p in part.get_offsets().tolist()]
    assert len(places) == len(set(places)) == tree.num_nodes


def test_drawing_refuses_what_it_cannot_draw_on() -> None:
    tree = SignalTree.from_windows(2)
    with pytest.raises(
        ValueError, match=r"path_or_ax must end in .png, .svg or .pdf, got 'tree.txt'"
    ):
        tree.draw("tree.txt")
    with pytest.raises(TypeError, match=r"path_or_ax must be .*, got int"):
        tree.draw(3)
    with pytest.raises(ValueError, match=r"max_nodes must be .*, got 0"):
        tree.draw(max_nodes=0)


# The package


def test_trees_need_torch_alone() -> None:
    code = (
        "import sys\n"
        "for name in ('numpy', 'scipy', 'transformers', 'matplotlib', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "from polyscale.trees import SignalTree\n"
        "tree = SignalTree.from_nested({'a': [1, 2], 'b': 3})\n"
        "SignalTree.batch([tree, SignalTree.from_image(8, 8, 2)]).validate()\n"
        "spans = {'offset_mapping': [(0, 3), (4, 7)]}\n"
        "SignalTree.from_text('One two', encoding=spans).outline()\n"
        "try:\n"
        "    tree.draw()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert "pip install 'polyscale[train]'" in result.stdout


@pytest.mark.parametrize("module", ["tree", "sentences"])
def test_the_examples_in_docstrings_are_true(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"polyscale.trees.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_snippets_of_the_docs_page_run_and_print_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trees.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(snippets) >= 8
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/trees.md", "exec"), names)
        printed = capsys.readouterr().out.splitlines()
        promised = [line[2:] for line in snippet.splitlines() if line.startswith("# ")]
        for line, found in zip(promised, printed, strict=False):
            assert line in (found, "...")
        assert not promised or promised[-1] == "..." or len(promised) == len(printed)
