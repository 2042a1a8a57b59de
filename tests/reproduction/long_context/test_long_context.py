from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch

import polyscale as ps
from reproduction.long_context import __main__ as command
from reproduction.long_context.articles import long_articles, read_pages
from reproduction.long_context.figure import draw_quality
from reproduction.long_context.measures import needle_prompt
from reproduction.long_context.peers import drop
from reproduction.long_context.report import write_report
from reproduction.long_context.settings import SETTINGS, find_settings
from tests.inject.models import llama


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model of bytes with its tokenizer, and a dump of four pages."""
    folder = tmp_path_factory.mktemp("long-context")
    torch.manual_seed(0)
    model = llama(vocab_size=257, num_hidden_layers=2, max_position_embeddings=700).float()
    model.save_pretrained(folder / "model")
    ps.byte_tokenizer().save_pretrained(folder / "model")
    pages = [f"<page>\n{'abcdefgh'[number] * (100 + 100 * number)} text." for number in range(6)]
    (folder / "data").mkdir()
    content = "<mediawiki>" + "".join(pages) + "<page>cut off"
    (folder / "data" / "enwik8.gz").write_bytes(gzip.compress(content.encode()))
    return folder / "model", folder / "data"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["long_context", *map(str, arguments)])
    command.main()


def test_articles_are_the_longest_pages_first_and_long_enough(
    folders: tuple[Path, Path],
) -> None:
    pages = read_pages(folders[1])
    assert [len(page) for page in pages] == sorted(map(len, pages), reverse=True)
    assert len(pages) == 6  # the last one was cut off
    found = long_articles(folders[1], ps.byte_tokenizer(), 2, 250, first=1)
    assert [tuple(ids.shape) for ids in found] == [(1, 250)] * 2
    with pytest.raises(ValueError, match="has 4 articles of 250 tokens"):
        long_articles(folders[1], ps.byte_tokenizer(), 9, 250)


def test_a_needle_stands_where_it_should_and_the_question_at_the_end() -> None:
    tokenizer = ps.byte_tokenizer()
    text = torch.full((1, 400), 98)
    at = []
    for depth in (0, 7):
        ids, number = needle_prompt(tokenizer, text, 400, depth)
        read = tokenizer.decode(ids[0])
        assert ids.shape == (1, 400)
        assert read.endswith("Answer: The secret number is")
        at.append(read.index(number))
    assert at[0] < 80 < 280 < at[1]


def test_every_measure_runs_goes_on_where_it_stopped_and_is_reported(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Settings so large that everything is opened are those of softmax attention.
    common = ["--model", folders[0], "--data-dir", folders[1], "--output", tmp_path]
    common += ["--work-dir", tmp_path / "work"]
    settings = [
        "--settings",
        "dense",
        "opened, heavy 512",
        "levels 4,4",
        "opened, heavy 512, levels 4,4",
    ]
    sizes = ["--articles", 2, "--prompt", 200, "--following", 40]
    run(monkeypatch, "perplexity", *common, *sizes, *settings)
    lines = (tmp_path / "perplexity.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 2
    run(monkeypatch, "perplexity", *common, *sizes, *settings)
    assert (tmp_path / "perplexity.jsonl").read_text().splitlines() == lines
    run(monkeypatch, "needles", *common, "--lengths", 200, "--articles", 2, *settings[:3])
    run(monkeypatch, "continuations", *common, *sizes[:4], "--following", 9, *settings[:4])
    run(monkeypatch, "first-token", *common, "--prompt", 200, "--rounds", 1, *settings[:3])
    decoding = ["--prompt", 200, "--batch", 2, "--steps", 1, "--rounds", 1]
    run(monkeypatch, "decoding", *common, *decoding, "--settings", "dense", "levels 4,4")
    other = [*common[:-4], "--output", tmp_path / "other", "--read", "opened, heavy 512"]
    run(monkeypatch, "perplexity", *other, *sizes, "--settings", "dense", "levels 4,4")
    assert (tmp_path / "other" / "perplexity.jsonl").is_file()
    text = write_report(tmp_path)
    summary = json.loads((tmp_path / "results.json").read_text())
    rows = {row["setting"]: row for row in summary["perplexity"]}
    assert rows["opened, heavy 512"]["ratio"] == pytest.approx(1, abs=1e-5)
    assert 1e-7 < abs(rows["levels 4,4"]["ratio"] - 1) < 0.05
    assert {row["setting"] for row in summary["needles"]} == {"dense", "opened, heavy 512"}
    assert summary["continuations"][0]["same"] == [9, 9]
    assert len(summary["timing"]) == 4
    for title in ("Perplexity of what follows", "numbers found", "continuations", "Time"):
        assert title in text


def test_peers_for_prompts_and_caches_are_measured_and_their_pairs_counted(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [
        "true mass, heavy 448",
        "antidiagonal, heavy 448",
        "pooled means, heavy 448",
        "Quest, heavy 448",
        "opened, mass .95, pairs counted",
        "opened, mass .95",
    ]
    caches = [
        "cache bfloat16",
        "cache fp8",
        "decoding: streaming, near 608",
        "decoding: top 544, rest dropped",
        "decoding: Quest 544",
        "levels 4,4, chosen once",
    ]
    common = ["--model", folders[0], "--data-dir", folders[1], "--output", tmp_path]
    sizes = ["--articles", 2, "--first", 1, "--prompt", 256, "--following", 150]
    run(monkeypatch, "perplexity", *common, *sizes, "--settings", "dense", *prompts, *caches)
    write_report(tmp_path)
    rows = {
        row["setting"]: row
        for row in json.loads((tmp_path / "results.json").read_text())["perplexity"]
    }
    assert {row["draw"] for row in rows.values()} == {"choosing"}
    for name in prompts[:4]:  # so many keys that all are opened
        assert rows[name]["share"] == 1
        assert rows[name]["ratio"] == pytest.approx(1, abs=1e-5)
    counted, own = rows[prompts[4]], rows[prompts[5]]
    assert 0.3 < counted["share"] < 1
    assert counted["ratios"] == pytest.approx(own["ratios"], rel=1e-6)
    assert list(own["ratios"]) == ["1", "2"]
    for name in caches[2:5]:  # all of 406 tokens are among the 544 or 608
        assert rows[name]["ratio"] == pytest.approx(1, abs=1e-5)
    for name in (*caches[:2], caches[5]):
        assert 1e-8 < abs(rows[name]["ratio"] - 1) < 0.05
    with pytest.raises(ValueError, match="got a peer's cache"):
        run(
            monkeypatch,
            "needles",
            *common,
            "--lengths",
            200,
            "--articles",
            1,
            "--settings",
            caches[0],
        )


def test_the_rest_is_dropped_but_for_near_first_and_the_heaviest_keys() -> None:
    query = torch.zeros(1, 2, 1, 8)
    query[..., 0] = 4.0
    key, value = torch.zeros(1, 1, 200, 8), torch.eye(200)[None, None]
    key[0, 0, [50, 90], 0] = torch.tensor([6.0, 5.0])
    for how, kept in (("top", {50, 90}), ("pages", {*range(48, 64), *range(80, 96)})):
        count = 2 if how == "top" else 32
        output = drop(query, key, value, 1.0, how, near=4, sinks=2, heavy=count)
        assert set(output[0, 1, 0].nonzero()[:, 0].tolist()) == {0, 1, *kept, *range(196, 200)}


def test_held_out_articles_are_reported_apart_from_those_that_chose(tmp_path: Path) -> None:
    for number in (7, 8, 9):
        for name, loss in (("dense", 2.0), ("levels 4,4", 2.0 + 0.01 * number)):
            record = {"setting": name, "item": f"64 + 9, article {number}", "loss": loss}
            with (tmp_path / "perplexity.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
    text = write_report(tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())["perplexity"]
    assert [(row["draw"], row["articles"]) for row in rows] == [("choosing", 1), ("held out", 2)]
    assert rows[0]["error"] is None
    assert rows[1]["worst_article"] == 9
    assert text.index("held-out articles") < text.index("chose the defaults")


def test_unknown_settings_are_refused_with_what_there_is() -> None:
    assert list(find_settings(["dense"])) == ["dense"]
    with pytest.raises(
        ValueError, match=r"must be among 'dense', 'opened, heavy 512'.*got 'other'"
    ):
        find_settings(["other"])
    assert all(setting.prompt is None for name, setting in SETTINGS.items() if name == "dense")


def test_the_committed_tables_follow_from_the_committed_measurements(tmp_path: Path) -> None:
    committed = Path(__file__).parents[3] / "experiments" / "long-context"
    for file in committed.glob("*.jsonl"):
        shutil.copy(file, tmp_path)
    write_report(tmp_path)
    for name in ("RESULTS.md", "results.json"):
        assert (tmp_path / name).read_text() == (committed / name).read_text()


def test_the_figure_draws_held_out_articles_whose_pairs_and_seconds_are_known(
    tmp_path: Path,
) -> None:
    row = {"draw": "held out", "length": "4096 + 512", "ratio": 1.01, "error": 0.002}
    summary = {
        "perplexity": [
            {**row, "setting": "opened, heavy 512, pairs counted", "share": 0.3},
            {**row, "setting": "Quest, heavy 448", "share": 0.25},
            {**row, "setting": "levels 4,4", "share": None},
        ],
        "timing": [
            {"item": "first token, 4096 tokens", "setting": "opened, heavy 512", "seconds": 4.0}
        ],
    }
    assert draw_quality(summary, tmp_path / "quality.svg")
    drawn = (tmp_path / "quality.svg").read_text()
    assert drawn.count('id="LineCollection') == 3 + 2  # error bars: of pairs, of seconds; legend
    summary["perplexity"] = summary["perplexity"][2:]
    assert not draw_quality(summary, tmp_path / "nothing.svg")
    assert not (tmp_path / "nothing.svg").exists()
