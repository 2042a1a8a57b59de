from io import StringIO

from rich.console import Console

from polyscale.report.charts import comparison_figures
from polyscale.report.comparison import Comparison
from polyscale.report.tables import comparison_markdown, table_cells, table_notes, terminal_table
from tests.training.fake_results import make_language_result, make_result, make_results

MANY = make_results() + [make_result(f"hkt-variant-{k}") for k in range(5)]


def compare(results=None, **options):
    return Comparison.from_results(make_results() if results is None else results, **options)


def printed(comparison, width=100):
    console = Console(width=width, file=StringIO(), no_color=True)
    console.print(terminal_table(comparison))
    return console.file.getvalue()


def test_the_table_has_every_figure_of_the_comparison():
    cells = dict(table_cells(compare()))
    assert cells["Test accuracy"] == ["61.0 ± 1.0 %", "67.7 ± 1.5 %"]
    assert cells["Difference"] == ["-", "+6.7 points [+5.2, +8.1]"]
    assert cells["Paired t-test, p"] == ["-", "0.002"]
    assert cells["Wilcoxon test, p"] == ["-", "0.250"]
    assert cells["Seeds"] == ["0, 1, 2", "0, 1, 2"]
    assert cells["Test-set error"] == ["± 2.2 points", "± 2.1 points"]
    assert cells["Majority-class rate"] == ["12.5%", "12.5%"]
    assert cells["Parameters"] == ["70,300", "70,320"]
    assert cells["GFLOPs per sample"] == ["0.00200 (1.00 x)", "0.00250 (1.25 x)"]
    assert cells["Attention score FLOPs"] == ["1.000 x", "1.312 x"]
    assert cells["Seconds"] == ["60 (1.00 x)", "75 (1.25 x)"]
    assert cells["Samples per second"] == ["1,234", "1,234"]


def test_one_seed_has_no_tests_in_its_table():
    labels = [label for label, _ in table_cells(compare(make_results([0.6], [0.66])))]
    assert "Difference" in labels
    assert "Paired t-test, p" not in labels
    assert not any("±" in note for note in table_notes(compare(make_results([0.6], [0.66]))))


def test_a_language_task_shows_bits_and_nothing_of_classes():
    results = [
        make_language_result(model, seed) for model in ("standard", "hkt") for seed in (0, 1)
    ]
    cells = dict(table_cells(compare(results)))
    assert cells["Test bits per token"] == ["2.000 ± 0.000"] * 2
    assert cells["Difference"] == ["-", "+0.000"]
    assert not {"Majority-class rate", "Test-set error"} & set(cells)
    assert "most frequent" not in compare(results).summary


def test_a_p_value_is_never_shown_as_zero():
    clear = make_results([0.5001, 0.5, 0.5002], [0.9, 0.9, 0.9001])
    assert dict(table_cells(compare(clear)))["Paired t-test, p"][1] == "< 0.001"


def test_every_label_of_the_table_is_explained():
    notes = " ".join(table_notes(compare()))
    for word in ("standard deviation", "Wilcoxon", "binomial", "most frequent", "counted"):
        assert word in notes
    assert "minus Standard attention" in notes


def test_the_terminal_shows_a_few_models_side_by_side():
    text = printed(compare())
    for cell in ("Standard attention", "HKT (3 levels)", "67.7 ± 1.5 %", "[+5.2, +8.1]", "1.312 x"):
        assert cell in text


def test_the_terminal_shows_many_models_below_each_other_with_whole_names():
    text = printed(compare(MANY))
    names = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert [name for name in names if name] == [row.name for row in compare(MANY).rows()]
    assert max(map(len, text.splitlines())) <= 100


def test_names_with_brackets_are_shown_as_they_are():
    text = printed(compare([*make_results(), make_result("[red]x[/red]")]))
    assert text.count("[red]x[/red]") == 2, "in the title and above its column"


def test_markdown_has_the_table_the_notes_and_its_figures():
    comparison = compare(command="polyscale compare --task listops")
    text = comparison_markdown(comparison, comparison_figures(comparison))
    assert text.startswith("# Standard attention and HKT (3 levels) on listops\n")
    assert "| Test accuracy | 61.0 ± 1.0 % | 67.7 ± 1.5 % |" in text
    assert "| Seed 1 | 62.0% | 69.0% |" in text
    assert "- With 3 seeds Wilcoxon's test" in text
    assert "![Accuracy on validation](figures/validation.svg)" in text
    assert "```bash\npolyscale compare --task listops\n```" in text


def test_markdown_of_many_models_has_a_row_for_each():
    text = comparison_markdown(compare(MANY), [])
    rows = [line for line in text.splitlines() if line.startswith("| hkt-variant-")]
    assert len(rows) == 5
    assert all(row.count("|") == rows[0].count("|") for row in rows)


def test_markdown_cannot_be_broken_by_a_name():
    text = comparison_markdown(compare([*make_results(), make_result("a|b*c")]), [])
    assert "a\\|b\\*c" in text


def test_a_missing_seed_is_shown_as_missing():
    text = comparison_markdown(compare(make_results()[:-1]), [])
    assert "| Seed 2 | 61.0% | missing |" in text
