"""Why a model answered as it did, drawn on the document itself: one HTML page."""

from __future__ import annotations

import math
from html import escape

from polyscale.documents import Document
from polyscale.models.hte.explanation import Explanation
from polyscale.report.colours import FIGURE_DARK, FIGURE_LIGHT
from polyscale.report.rendering import render, trusted

FOR, AGAINST = "31, 99, 181", "180, 83, 10"  # blue and orange, distinguishable for all
TOP = 12


def reasons_page(explanation: Explanation) -> str:
    """Return a page with the source, each leaf marked by what it adds to the answer.

    Blue is for the label, orange against it; the parts that matter most, and the fields of a
    record, stand in tables above. An HTML source is shown as the page it is, in a frame in which
    no script runs; any other as text.

    >>> from polyscale import HTEForClassification, HTEProcessor
    >>> processor = HTEProcessor.from_documents(["A fish.", "A bird."], ["fish", "bird"])
    >>> model = HTEForClassification.from_processor(processor, hidden_size=16)
    >>> "<mark" in reasons_page(model.explain("A fish."))
    True
    """
    document = explanation.document
    effects = leaf_effects(explanation)
    is_page = document.source is not None and explanation.format == "html"
    marked = _marked(document, effects, is_page=is_page)
    frame = f'<iframe sandbox srcdoc="{escape(marked)}" title="the page"></iframe>'
    return render(
        "reasons.html.j2",
        styles=["base.css"],
        light=FIGURE_LIGHT,
        dark=FIGURE_DARK,
        title=f"Why {explanation.label}",
        logit=f"{explanation.logit:.3f}",
        agreement=_agreement(explanation.agreement),
        parts=[
            (document.kinds[node], f"{effect:+.3f}", _short(text))
            for node, effect, text in explanation.top(TOP)
        ],
        fields=[
            (name, f"{effect:+.3f}")
            for name, effect in explanation.fields().items()
            if not math.isnan(effect)
        ],
        marked=trusted(frame if is_page else f'<pre class="wrap">{marked}</pre>'),
    )


def leaf_effects(explanation: Explanation) -> list[float]:
    """Return for each row the effect of the smallest node around it that has been left out."""
    tree = explanation.document.tree
    effect = explanation.left_out.tolist()
    parents = tree.parent.tolist()
    found = []
    for node in tree.row_node.tolist():
        while node >= 0 and math.isnan(effect[node]):
            node = parents[node]
        found.append(effect[node] if node >= 0 else 0.0)
    return found


def _marked(document: Document, effects: list[float], *, is_page: bool) -> str:
    """The source with a mark around every leaf; without a source, the leaves."""
    strongest = max((abs(effect) for effect in effects), default=0.0) or 1.0
    source, offsets = document.source, document.tree.source_offsets
    if source is None or offsets is None:
        shown = zip(document.values, effects, strict=True)
        return " ".join(_mark(escape(_short(str(v))), effect, strongest) for v, effect in shown)
    plain = str if is_page else escape  # a page keeps its own markup
    parts, at = [], 0
    for begin, end, row in sorted((*span, row) for row, span in enumerate(offsets.tolist())):
        if begin >= at:  # otherwise it has no place, or is a second leaf of one place
            parts.append(plain(source[at:begin]))
            parts.append(_mark(plain(source[begin:end]), effects[row], strongest))
            at = end
    return "".join([*parts, plain(source[at:])])


def _mark(inside: str, effect: float, strongest: float) -> str:
    colour = FOR if effect >= 0 else AGAINST
    share = 0.6 * abs(effect) / strongest
    style = f"background: rgba({colour}, {share:.2f}); color: inherit"
    return f'<mark title="{effect:+.4f}" style="{style}">{inside}</mark>'


def _agreement(value: float) -> str:
    return "not known" if math.isnan(value) else f"{value:.2f}"


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:159] + "…"
