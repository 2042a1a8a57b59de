"""What the JSON of an analysis holds: every section and every entry, with its types.

A section that does not apply to a model is absent. Numbers have six significant digits, and None
stands where a number was not finite or could not be computed. `check_schema` compares a dict with
these types.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from typing_extensions import TypedDict, is_typeddict

from polyscale.analysis.values import MapRows

FORMAT = 1

Number = float | None
Level = int | str  # the number of a level, or "merged"
Matrix = list[list[Number]]


class Meta(TypedDict):
    """What was analysed, and how."""

    title: str
    model: str
    kind: str  # "hkt", "hsa" or "transformer"
    layers: int
    heads: int
    levels: int | None
    tokens: list[str] | None  # of the example, if there are names and not too many
    text: str | None
    length: int  # tokens of the example
    rows_used: int  # query rows behind the means of the error section
    notes: list[str]  # what was cut, sampled or left out
    versions: dict[str, str]
    seconds: float


class LevelWeights(TypedDict):
    """Section `levels`."""

    weights: list[list[list[float]]]  # layer, head, level


class _Head(TypedDict):
    layer: int
    head: int


class _HeadAndLevel(_Head):
    level: Level


class _Spectrum(_Head):
    eigenvalues: list[float]  # descending; the outer ones if there are many
    size: int  # of the matrix
    fraction_negative: float  # of the eigenvalues that are not zero
    negative_share: float  # of the sum of their absolute values
    smallest: float
    psd: bool
    margin: float  # the smallest over the largest in absolute value


class _FormWithBias(TypedDict, total=False):
    psd_with_bias: bool
    smallest_with_bias: float
    margin_with_bias: float


class FormSpectrum(_Spectrum, _FormWithBias):
    """The bilinear form of a head; `level` is None where levels share their projections."""

    level: int | None


class ScoreSpectrum(_Spectrum):
    """The scores of a head on the example, at one level or merged."""

    level: Level


class Kernel(TypedDict):
    """Section `kernel`."""

    forms: list[FormSpectrum]
    scores: list[ScoreSpectrum]
    note: str


class SymmetryShares(_HeadAndLevel):
    """Energy of the scores and the shares of their two parts."""

    reciprocal: Number
    directional: Number
    energy: Number


class PartMaps(_HeadAndLevel):
    """Both parts of a head's scores as maps."""

    symmetric: Matrix
    antisymmetric: Matrix
    pooled_from: int | None  # rows before averaging, None if nothing was averaged


class Symmetry(TypedDict):
    """Section `symmetry`."""

    parts: list[SymmetryShares]
    maps: list[PartMaps]


class ErrorRow(_Head):
    """The decomposition of the error, means over query rows."""

    levels_used: int
    stride: int
    kl: Number
    resolution: Number
    drift: Number
    non_gaussian: Number
    third_cumulant_term: Number
    fourth_cumulant_term: Number
    total_variation: Number


class ErrorShare(_HeadAndLevel):
    """What one level contributes to resolution and drift together."""

    gaussian: Number


class TailEntry(_HeadAndLevel):
    """What the levels from `level` on add to a score at most, by the bound and measured."""

    bound: Number
    measured: Number


class Decay(_Head):
    """The ratio of successive terms of the tail."""

    ratio: Number
    terms: list[Number]


class Error(TypedDict):
    """Section `error`."""

    rows: list[ErrorRow]
    strides: list[ErrorRow]
    levels: list[ErrorShare]
    tail: list[TailEntry]
    decay: list[Decay]


class NormalityTests(_HeadAndLevel):
    """Mardia's tests of a head's score rows; None where there are too few."""

    n: int
    dimensions: int
    skewness: Number
    skewness_p: Number
    kurtosis: Number
    kurtosis_p: Number
    kurtosis_expected: Number
    qq: Matrix


class NormalityAtStep(TypedDict):
    """Means over the heads of a layer, at one snapshot of the training."""

    step: int
    layer: int
    level: Level
    skewness: Number
    kurtosis: Number
    kurtosis_expected: Number


class Normality(TypedDict):
    """Section `normality`."""

    levels: list[NormalityTests]
    over_training: list[NormalityAtStep]


class Products(TypedDict):
    """FLOPs of matrix products and the bytes they read and write."""

    flops: int
    bytes: int


class LevelProducts(Products):
    """The score products of one level."""

    level: int


class CostSection(TypedDict):
    """Section `cost`."""

    levels: list[LevelProducts]
    standard: Products
    ratio: float  # of score FLOPs to standard attention
    whole_ratio: float  # the same with the product of weights and values


class AttentionMap(_HeadAndLevel):
    """One attention matrix, averaged to a size that can be shown."""

    map: Matrix
    pooled_from: int | None


class Family(TypedDict):
    """A node of the tree with children, and what is lost by tying them."""

    node: int
    parent: int
    depth: int
    leaves: int
    label: str
    kl: Number
    energy: Number
    dilution: Number


class OpenedFamily(TypedDict):
    """What opening one family would change."""

    node: int
    kl_before: float
    kl_after: float
    scores_before: int
    scores_after: int


class TreeLosses(_Head):
    """What a head loses to its tree, family by family, worst first."""

    kl_total: Number
    families: list[Family]
    kl_unlisted: Number
    finer: list[OpenedFamily]


class Tree(TypedDict):
    """The tree of the first layer."""

    parent: list[int]
    label: list[str]
    leaf_tokens: list[str]
    leaf_nodes: list[int]


class TreeSection(TypedDict):
    """Section `hsa`."""

    layers: list[TreeLosses]
    tree: Tree


class _Required(TypedDict):
    format: int
    meta: Meta
    summary: list[str]


class Analysis(_Required, total=False):
    """All of it: what `polyscale analyze` writes to report.json."""

    levels: LevelWeights
    kernel: Kernel
    symmetry: Symmetry
    error: Error
    normality: Normality
    cost: CostSection
    attention: list[AttentionMap]
    hsa: TreeSection


def check_schema(analysis: Any) -> None:
    """Raise ValueError unless `analysis` is an `Analysis`; names the first place where it is not.

    >>> check_schema({"format": 1, "meta": {"title": 3}, "summary": []})
    Traceback (most recent call last):
    ValueError: analysis['meta'] must have the key 'model', got 'title' alone
    """
    problem = next(_problems(analysis, Analysis, "analysis"), None)
    if problem is not None:
        raise ValueError(problem)


def _problems(value: Any, expected: Any, place: str) -> Iterator[str]:
    origin, arguments = get_origin(expected), get_args(expected)
    if is_typeddict(expected):
        yield from _entry_problems(value, expected, place)
    elif origin in (Union, UnionType):
        if not any(next(_problems(value, one, place), None) is None for one in arguments):
            yield _message(place, expected, value)
    elif origin is list:
        if isinstance(value, MapRows):  # made of finite numbers, and long
            return
        if not isinstance(value, list):
            yield _message(place, expected, value)
            return
        for at, item in enumerate(value):
            yield from _problems(item, arguments[0], f"{place}[{at}]")
    elif origin is dict:
        if not isinstance(value, dict):
            yield _message(place, expected, value)
            return
        for key, item in value.items():
            yield from _problems(item, arguments[1], f"{place}[{key!r}]")
    elif not _is_instance(value, expected):
        yield _message(place, expected, value)


def _entry_problems(value: Any, expected: Any, place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _message(place, expected, value)
        return
    types = get_type_hints(expected)
    found = " and ".join(map(repr, value)) + (" alone" if len(value) == 1 else "") or "none"
    for key in types:
        if key in expected.__required_keys__ and key not in value:
            yield f"{place} must have the key {key!r}, got {found}"
    for key, item in value.items():
        if key not in types:
            yield f"{place} must not have the key {key!r}; it takes {', '.join(types)}"
        else:
            yield from _problems(item, types[key], f"{place}[{key!r}]")


def _is_instance(value: Any, expected: type) -> bool:
    if expected is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, expected)


def _message(place: str, expected: Any, value: Any) -> str:
    name = getattr(expected, "__name__", None) if not get_args(expected) else str(expected)
    shown = (
        repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    )
    return f"{place} must be {name}, got {shown}"
