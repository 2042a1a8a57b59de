"""RESULTS.md: the paper's figures beside ours, and every table of the study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyscale._files import write_text
from reproduction.records import Record, Records
from reproduction.study import RESULTS_MARKDOWN
from reproduction.zero_shot.figures import figures
from reproduction.zero_shot.injections import Injection, layer_sets


class PaperResult(NamedTuple):
    """What the paper reports: RoBERTa, no training, windows (2, 4, 8, 16)."""

    before: float  # accuracy, percent
    after: float
    flops_before: float  # million per replaced layer
    flops_after: float
    model: str


PAPER = {
    "sst2": PaperResult(94.03, 90.25, 2.1, 0.41, "RoBERTa, layers 7, 9, 11"),
    "agnews": PaperResult(94.69, 94.22, 9.0, 0.84, "RoBERTa, layers 7, 9, 11"),
    "imdb-char": PaperResult(95.58, 94.94, 214.9, 4.3, "RoBERTa large, layers 16 to 24, even"),
}


def write_tables(records: Records) -> list[Path]:
    """Write RESULTS.md and the figures of all finished measurements; return the files."""
    drawn = figures(records)
    for name, svg in drawn.items():
        write_text(records.folder / "figures" / name, svg)
    write_text(records.folder / RESULTS_MARKDOWN, markdown(records, list(drawn)))
    return [
        records.folder / RESULTS_MARKDOWN,
        *(records.folder / "figures" / name for name in drawn),
    ]


def markdown(records: Records, drawn: Sequence[str] = ()) -> str:
    """All tables as one Markdown text."""
    preset = records.head["preset"]
    lines = [
        "# HSA in a pretrained model, with no training",
        "",
        f"Made by `polyscale reproduce hsa-zero-shot --preset {preset['name']}` with "
        f"{records.head['model']}, seed {records.head['seed']}. The model is fine-tuned on each "
        "task with its own softmax attention; then chosen layers get HSA and nothing is trained. "
        "Layers are counted from 0. *Lost* is accuracy before less accuracy after, in points, on "
        "the same texts, with the standard error of that difference. FLOPs are those of the "
        "attention of one replaced layer. All figures: results.json.",
        "",
    ]
    left = [name for name in records.head.get("units", []) if name not in records]
    if left:
        lines += [f"**Not finished:** {len(left)} units are still to be done.", ""]
    sections = (_headline, _fine_tuning, _grid, _sinks, _recovery, _timing, _embeddings)
    for section in sections:
        lines += section(records)
    if drawn:
        lines += ["## Figures", "", *(f"![{name[:-4]}](figures/{name})" for name in drawn), ""]
    seconds = sum(one["seconds"] for one in records.records.values())
    lines.append(f"{len(records.records)} units, {seconds / 3600:.1f} hours in all.")
    return "\n".join(lines) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def _sizes(records: Records) -> list[dict[str, Any]]:
    return records.head["preset"]["tasks"]


def _lost(values: dict[str, Any]) -> str:
    return f"{values['lost']:+.2f} ± {values['lost_error']:.2f}"


def _share(value: float | None) -> str:
    return "depends on the text" if value is None else f"{100 * value:.1f} %"


def _headline(records: Records) -> list[str]:
    """The paper's row of each task, then the chosen settings, on texts not used for the choice."""
    lines: list[str] = []
    for size in _sizes(records):
        found = records.of("final", size["name"])
        if not found:
            continue
        header = (
            "setting", "layers", "before", "after", "lost", "MFLOPs", "saved",
            f"saved at {size['flops_length']} tokens", "KL",
        )  # fmt: skip
        paper = PAPER.get(size["name"])
        rows = [] if paper is None else [_paper_row(paper)]
        refused = []
        for one in found:
            values, name = one["values"], one["config"]["name"]
            if "refused" in values:
                refused.append(f"{name}: {values['refused']}.")
            else:
                rows.append(_setting_row(name, values))
        lines += [f"## {size['title']}", ""]
        lines += _table(header, rows)
        lines += [*refused, *([""] if refused else []), _verdict(size, found), ""]
    if lines:
        lines += [
            "Test texts that neither the planner nor the grid has seen. *Saved* is at the real "
            "lengths of the texts; KL is the certified distance of the replaced layers' attention "
            "to softmax, in nats per token and head, sinks counted as tied. *Plan* is the "
            "planner's choice on unlabelled training texts: *any* hierarchy, or only *cheap* ones; "
            "its budget is the share of all attention FLOPs.",
            "",
        ]
    return lines


def _paper_row(paper: PaperResult) -> tuple[str, ...]:
    return (
        f"the paper: {paper.model}",
        "",
        f"{paper.before:.2f}",
        f"{paper.after:.2f}",
        f"{paper.before - paper.after:+.2f}",
        f"{paper.flops_before:g} → {paper.flops_after:g}",
        _share(1 - paper.flops_after / paper.flops_before),
        "",
        "",
    )


def _setting_row(name: str, values: dict[str, Any]) -> tuple[str, ...]:
    injection = Injection.from_dict(values["injection"])
    return (
        f"{name}: {injection.kind}",
        ", ".join(str(layer) for layer in injection.layers),
        f"{values['accuracy_before']:.2f}",
        f"{values['accuracy']:.2f}",
        _lost(values),
        f"{values['flops_before'] / 1e6:.3g} → {values['flops_after'] / 1e6:.3g}",
        _share(values["saved"]),
        _share(values["saved_at_length"]),
        f"{values['kl']:.3f}",
    )


def _verdict(size: dict[str, Any], found: Sequence[Record]) -> str:
    """Which settings meet the aim, of all that save enough: none is picked by its result."""
    aim = (
        f"lose no more than {size['lost']} points and save at least {100 * size['saved']:.0f} % "
        f"at {size['flops_length']} tokens"
    )
    able = [
        one
        for one in found
        if one["values"].get("saved_at_length") is not None
        and one["values"]["saved_at_length"] >= size["saved"]
    ]
    if not able:
        return f"Aim: {aim}. No setting here saves that much."
    told = [
        f"{one['config']['name']} ({_lost(one['values'])} points)"
        for one in able
        if one["values"]["lost"] <= size["lost"]
    ]
    if not told:
        return f"Aim: {aim}. Met by none of the {len(able)} settings that save that much."
    return (
        f"Aim: {aim}. Met by {len(told)} of the {len(able)} settings that save that much, on "
        f"{able[0]['values']['texts']:,} texts: {'; '.join(told)}."
    )


def _fine_tuning(records: Records) -> list[str]:
    rows = []
    for size in _sizes(records):
        for one in records.of("fine-tuning", size["name"]):
            values = one["values"]
            rows.append(
                (
                    size["title"],
                    f"{size['train']:,}",
                    f"{size['length']}",
                    f"{values['mean_length']:.0f}",
                    f"{values['steps']:,} x {size['batch_size']}",
                    f"{100 * values['validation']['accuracy']:.2f}",
                    f"{values['test_accuracy']:.2f}",
                    f"{values['majority']:.2f}",
                    f"{size['grid']:,} and {size['final']:,}",
                    f"{values['training_seconds'] / 60:.0f}",
                )
            )
    if not rows:
        return []
    header = (
        "task", "training texts", "tokens, at most", "mean", "steps x texts", "validation",
        "test (grid)", "majority class", "test texts: grid and final", "minutes",
    )  # fmt: skip
    return ["## Fine-tuning, before any injection", "", *_table(header, rows)]


def _grid(records: Records) -> list[str]:
    lines: list[str] = []
    for size in _sizes(records):
        found: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {}
        for one in records.of("grid", size["name"]):
            injection = Injection.from_dict(one["config"])
            if injection.sinks:
                found.setdefault(injection.kind, {})[injection.layers] = one["values"]
        if not found:
            continue
        count = 1 + max(max(layers) for row in found.values() for layers in row)
        sets = layer_sets(count)
        header = ("kind", *(f"{name}: {' '.join(map(str, sets[name]))}" for name in sets))
        rows = [
            (kind, *(_point(row.get(layers)) for layers in sets.values()))
            for kind, row in found.items()
        ]
        errors = [one["lost_error"] for row in found.values() for one in row.values()]
        lines += [f"### {size['title']}", "", *_table(header, rows)]
        lines += [
            f"{size['grid']:,} test texts; standard errors of the differences up to "
            f"{max(errors):.2f} points.",
            "",
        ]
    if not lines:
        return []
    return [
        "## Points lost, by hierarchy and layers",
        "",
        "*Alternate 4* starts at the fourth layer (number 3) and takes every other one; "
        "*consecutive 4* takes as many in a row. The first and the last token are sinks.",
        "",
        *lines,
    ]


def _point(values: dict[str, Any] | None) -> str:
    return "" if values is None else f"{values['lost']:+.2f}"


def _sinks(records: Records) -> list[str]:
    """With and without sinks in the same layers, with the KL certificate and the FLOPs."""
    lines: list[str] = []
    for size in _sizes(records):
        certificates = records.of("certificate", size["name"])
        grid = [
            (Injection.from_dict(one["config"]), one["values"])
            for one in records.of("grid", size["name"])
        ]
        bare = [injection for injection, _ in grid if not injection.sinks]
        if not certificates or not bare:
            continue
        kinds = {one["kind"]: one for one in certificates[0]["values"]["kinds"]}
        layers = bare[0].layers
        rows = []
        for injection, values in grid:
            if injection.layers != layers:
                continue
            one = kinds[injection.kind]
            kl = sum(one["kl"][layer] for layer in layers) / len(layers)
            rows.append(
                (
                    injection.kind,
                    _lost(values),
                    f"{kl:.3f}",
                    f"{one['flops_before'] / 1e6:.3g} → {one['flops_after'] / 1e6:.3g}",
                    _share(one["saved"]),
                    _share(values["saved_at_length"]),
                )
            )
        header = (
            "kind", "lost", "KL", "MFLOPs per layer", "saved",
            f"saved at {size['flops_length']} tokens",
        )  # fmt: skip
        shown = ", ".join(str(layer) for layer in layers)
        lines += [f"### {size['title']}, layers {shown}", "", *_table(header, sorted(rows))]
    return ["## Sinks, certificates and FLOPs", "", *lines] if lines else []


def _recovery(records: Records) -> list[str]:
    lines: list[str] = []
    for size in _sizes(records):
        found = records.of("recovery", size["name"])
        if not found:
            continue
        steps = [point["step"] for point in found[0]["values"]["curve"]]
        rows = [
            (
                one["id"].rsplit("/", 1)[-1],
                Injection.from_dict(one["config"]).name if one["config"] else "no injection",
                *(f"{p['accuracy']:.2f} ({p['lost']:+.2f})" for p in one["values"]["curve"]),
            )
            for one in found
        ]
        header = ("", "setting", *(f"{step} steps" for step in steps))
        samples = found[0]["values"]["samples_per_step"]
        lines += [f"### {size['title']}, {samples} texts a step", "", *_table(header, rows)]
    if not lines:
        return []
    return [
        "## Fine-tuning after the injection",
        "",
        "Accuracy and points lost against the model before any injection, on the texts of the "
        "grid, along one run with a linear schedule. *None* trains on without an injection.",
        "",
        *lines,
    ]


def _timing(records: Records) -> list[str]:
    found = records.of("timing")
    if not found:
        return []
    lines = ["## Wall-clock", ""]
    lengths = [one["config"]["length"] for one in found]
    for part, title in (("attention", "one attention layer"), ("model", "the whole model")):
        rows = []
        for kind in found[0]["values"][part]:
            cells = []
            for one in found:
                seconds = one["values"][part]
                ratio = seconds["original"] / seconds[kind]
                cells.append(f"{1e3 * seconds[kind]:.1f} (x {ratio:.2f})")
            rows.append((kind, *cells))
        header = (f"{title}, ms", *(f"{length} tokens" for length in lengths))
        lines += _table(header, rows)
    machine = found[0]["values"]["machine"]
    lines += [
        f"Batches of {found[0]['config']['batch']} on {machine['processor']}, "
        f"{machine['threads']} threads; best of {found[0]['config']['rounds']} turns, taken "
        "alternately in one process. In parentheses, how many times as fast as the original "
        "(`scaled_dot_product_attention`). One layer builds its tree of sentences itself; in a "
        "model all layers share it.",
        "",
    ]
    return lines


def _embeddings(records: Records) -> list[str]:
    found = records.of("embeddings")
    if not found:
        return []
    rows = []
    for one in found:
        injection, values = Injection.from_dict(one["config"]), one["values"]
        cells = [
            f"{values[part][figure]:.3f}"
            for part in ("sentences", "reviews")
            for figure in ("cosine", "spearman")
        ]
        rows.append((", ".join(str(layer) for layer in injection.layers), injection.kind, *cells))
    header = (
        "layers", "kind", "sentences: cosine", "ranking", "reviews: cosine", "ranking",
    )  # fmt: skip
    first = found[0]["values"]
    return [
        "## Sentence embeddings",
        "",
        "The model as it was published, mean of the last hidden states: mean cosine to the "
        "original's embedding, and Spearman's correlation of the similarities of all pairs. "
        f"{first['sentences']['texts']} sentences and {first['reviews']['texts']} reviews of IMDB.",
        "",
        *_table(header, sorted(rows)),
    ]
