"""The figures of the study as SVG files."""

from __future__ import annotations

import io
from typing import Any

from polyscale._extras import require
from polyscale.report.figures import LIGHT, GroupPoint, group_chart, line_chart, standalone
from reproduction.records import Records
from reproduction.zero_shot.injections import Injection, layer_sets

FEW = 6  # series of a chart


def figures(records: Records) -> dict[str, str]:
    """Return the figures of the finished measurements, by file name."""
    found: dict[str, str] = {}
    for size in records.head["preset"]["tasks"]:
        for name, draw in (("layers", _layers), ("recovery", _recovery)):
            svg = draw(records, size)
            if svg is not None:
                found[f"{size['name']}-{name}.svg"] = standalone(svg)
    if records.of("timing"):
        found["timing.svg"] = _timing(records)
    return found


def _layers(records: Records, size: dict[str, Any]) -> str | None:
    """Accuracy by the set of injected layers, for each hierarchy with the column tie."""
    grid = [
        (Injection.from_dict(one["config"]), one["values"])
        for one in records.of("grid", size["name"])
    ]
    grid = [(one, values) for one, values in grid if one.tie == "columns" and one.sinks]
    if not grid:
        return None
    count = 1 + max(max(one.layers) for one, _ in grid)
    names = {layers: " ".join(map(str, layers)) for layers in layer_sets(count).values()}
    series: dict[str, list[GroupPoint]] = {}
    for one, values in grid:
        point = GroupPoint(
            names[one.layers], values["accuracy"] / 100, values["accuracy_error"] / 100
        )
        series.setdefault(one.kind.split(" ")[0], []).append(point)
    return group_chart(
        dict(list(series.items())[:FEW]),
        title=f"{size['title']}: accuracy by injected layers",
        x_label="injected layers, counted from 0 (columns, sinks)",
        y_label="accuracy",
        reference=("original", grid[0][1]["accuracy_before"] / 100),
    )


def _recovery(records: Records, size: dict[str, Any]) -> str | None:
    """Accuracy over the steps of fine-tuning after the injection."""
    curves = {
        one["id"].rsplit("/", 1)[-1]: [
            (point["step"], point["accuracy"] / 100) for point in one["values"]["curve"]
        ]
        for one in records.of("recovery", size["name"])
    }
    if not curves:
        return None
    return line_chart(
        curves,
        title=f"{size['title']}: fine-tuning after the injection",
        y_label="accuracy",
        percent=True,
    )


def _timing(records: Records) -> str:
    """Seconds of one attention layer by length, both axes by powers of two."""
    matplotlib = require("matplotlib", "train", "a figure")
    figure = require("matplotlib.figure", "train", "a figure").Figure(
        figsize=(6.4, 4.4), layout="constrained"
    )
    axes = figure.add_subplot()
    found = records.of("timing")
    lengths = [one["config"]["length"] for one in found]
    colours = [LIGHT[f"series-{index}"] for index in range(8)]
    trees: dict[str, str] = {}
    for kind in found[0]["values"]["attention"]:
        tree = kind.split(" ")[0]
        colour = trees.setdefault(tree, colours[len(trees) % len(colours)])
        milliseconds = [1e3 * one["values"]["attention"][kind] for one in found]
        dashes = "--" if " blocks" in kind else "-"
        axes.plot(lengths, milliseconds, dashes, marker="o", color=colour, label=kind)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_title("One attention layer", loc="left", fontsize=11)
    axes.set_xlabel("tokens")
    axes.set_ylabel("milliseconds")
    axes.grid(color=LIGHT["grid"], linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    buffer = io.StringIO()
    # With a fixed salt and no date, the same numbers give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "timing"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
