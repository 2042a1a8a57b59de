"""What the public functions refuse, and how they say it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from polyscale.ops.hsa.families import plans_of
from polyscale.ops.tracing import has_only_a_shape, has_values

if TYPE_CHECKING:
    from polyscale.trees import SignalTree

PositionScores = Tensor | tuple[Tensor, Tensor] | None
TIES = ("blocks", "columns")
IMPLEMENTATIONS = ("auto", "reference", "torch", "native")


class HSAOptions(TypedDict, total=False):
    """The options of `hsa_attention`, which says what they mean, but for `impl`."""

    tie: str
    causal: bool
    include_self: bool
    key_padding_mask: Tensor | None
    position_scores: PositionScores
    scale: float | None
    alpha: float | Tensor
    enable_gqa: bool


@dataclass(frozen=True)
class Request:
    """The arguments of a call, checked: tensors are [B, H, N, D], B = 1 if packed."""

    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, H or fewer, N, D]
    value: Tensor  # [B, H or fewer, N, Dv]
    tree: SignalTree
    tie: str
    causal: bool
    include_self: bool
    ignored: Tensor | None  # [B, N]
    position_query: Tensor | None  # [H or 1, M, P]
    position_key: Tensor | None  # [H or 1, M, P]
    scale: float
    alpha: Tensor | None  # [depths], None for softmax
    impl: str
    packed: bool
    dtype: torch.dtype  # of the result

    def widened(self) -> Request:
        """Return the request with a key head for each query head, in the dtype to work in.

        Sixteen-bit floats are too coarse for scores: one step at 100 is already 0.06 or more.
        """
        working = torch.float64 if self.dtype == torch.float64 else torch.float32
        groups = self.query.shape[1] // max(1, self.key.shape[1])
        key, value = self.key, self.value
        if groups > 1:
            key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        return replace(
            self, query=self.query.to(working), key=key.to(working), value=value.to(working)
        )


def check_request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: SignalTree,
    *,
    tie: str = "blocks",
    causal: bool = False,
    include_self: bool = True,
    key_padding_mask: Tensor | None = None,
    position_scores: PositionScores = None,
    scale: float | None = None,
    alpha: float | Tensor = 1.0,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Request:
    """Refuse what cannot be meant; return the rest in one shape."""
    _check_choice("tie", tie, TIES)
    _check_choice("impl", impl, IMPLEMENTATIONS)
    flags = (("causal", causal), ("include_self", include_self), ("enable_gqa", enable_gqa))
    for name, flag in flags:
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    _check_tree(tree)
    if causal and tie == "blocks":
        raise ValueError(
            'causal=True needs tie="columns": with tie="blocks" the rows of a block share the mean '
            "of their queries, so a later token would change earlier rows"
        )
    _check_tensors(query, key, value, tree, enable_gqa)
    # A compiled graph cannot look at a tree; the kernel looks when it runs.
    looks = not torch.compiler.is_compiling() and not has_only_a_shape(query)
    if causal and looks and not plans_of(tree).rows_in_order:
        raise ValueError(
            "causal=True: the tree's leaves, from left to right, must carry data rows in "
            "increasing order; got a tree whose leaves carry them in another order"
        )
    packed = query.dim() == 3
    tensors = [part.unsqueeze(0) if packed else part for part in (query, key, value)]
    batch, heads, rows, width = tensors[0].shape
    if scale is None:
        scale = 1 / math.sqrt(width)
    elif isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number or None for 1 / sqrt(D), got {scale!r}")
    positions = _check_positions(position_scores, heads, tree, query)
    working = torch.float64 if query.dtype == torch.float64 else torch.float32
    return Request(
        query=tensors[0],
        key=tensors[1],
        value=tensors[2],
        tree=tree,
        tie=tie,
        causal=causal,
        include_self=include_self,
        ignored=_check_mask(key_padding_mask, batch, rows, packed, query),
        position_query=None if positions is None else positions[0].to(working),
        position_key=None if positions is None else positions[1].to(working),
        scale=float(scale),
        alpha=_check_alpha(alpha, tree, query.device, working),
        impl=impl,
        packed=packed,
        dtype=query.dtype,
    )


def _check_choice(name: str, got: Any, choices: tuple[str, ...]) -> None:
    if got not in choices:
        takes = ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be one of {takes}, got {got!r}")


def _check_tree(tree: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a look at the tuples of a tree would compile a graph for their lengths
    needed = ("parent", "leaf_order", "leaf_row", "row_node", "depth_offsets", "tree_rows")
    if not all(hasattr(tree, name) for name in needed):
        raise TypeError(f"tree must be a SignalTree, got {type(tree).__name__}")


def _check_tensors(
    query: Tensor, key: Tensor, value: Tensor, tree: SignalTree, enable_gqa: bool
) -> None:
    parts = {"query": query, "key": key, "value": value}
    for name, part in parts.items():
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(part).__name__}")
        if not part.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {part.dtype}")
        if part.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {part.dtype}")
        if part.device != query.device:
            raise ValueError(f"{name}: is on {part.device}, query is on {query.device}")
        if part.dim() not in (3, 4):
            raise ValueError(
                f"{name} must have shape [B, H, N, D] or packed [H, N, D], got {list(part.shape)}"
            )
        if enable_gqa and name != "query":
            _check_groups(name, part, query, key)
        elif part.shape[:-1] != query.shape[:-1]:
            raise ValueError(
                f"{name} must have shape {list(query.shape[:-1])} and a width, as query has, "
                f"got {list(part.shape)}"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key must have the width of query, {query.shape[-1]}, got {key.shape[-1]}"
        )
    if query.shape[-1] == 0:
        raise ValueError(f"query must have a width of at least 1, got shape {list(query.shape)}")
    if query.shape[-2] != tree.num_rows:
        raise ValueError(
            f"query must have the tree's {tree.num_rows} rows, got {query.shape[-2]} "
            f"(shape {list(query.shape)})"
        )
    if tree.parent.device != query.device and not has_only_a_shape(query):
        raise ValueError(
            f"tree: is on {tree.parent.device}, query is on {query.device}; move it with "
            "tree.to(query.device)"
        )


def _check_groups(name: str, part: Tensor, query: Tensor, key: Tensor) -> None:
    """Refuse a key or value whose heads cannot be shared by the heads of the query."""
    heads, others = query.shape[-3], part.shape[-3]
    same = part.dim() == query.dim() and part.shape[-2] == query.shape[-2]
    same = same and part.shape[:-3] == query.shape[:-3] and others == key.shape[-3]
    if not same or not others or heads % others:
        raise ValueError(
            f"{name} must have shape {list(query.shape[:-1])} and a width, or with enable_gqa a "
            f"number of heads that divides {heads}, the same for key and value, "
            f"got {list(part.shape)}"
        )


def _check_mask(
    mask: Tensor | None, batch: int, rows: int, packed: bool, query: Tensor
) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"key_padding_mask must be a bool tensor (True: ignore the row), got {got}")
    expected = [rows] if packed else [batch, rows]
    if list(mask.shape) != expected:
        raise ValueError(f"key_padding_mask must have shape {expected}, got {list(mask.shape)}")
    if mask.device != query.device:
        raise ValueError(f"key_padding_mask: is on {mask.device}, query is on {query.device}")
    return mask[None] if packed else mask


def _check_positions(
    scores: PositionScores, heads: int, tree: SignalTree, query: Tensor
) -> tuple[Tensor, Tensor] | None:
    if scores is None:
        return None
    pair = (scores, scores) if isinstance(scores, Tensor) else scores
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(
            f"position_scores must be a tensor or a pair of tensors, got {type(scores).__name__}"
        )
    found = []
    for part in pair:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            got = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise TypeError(
                f"position_scores must be floating-point tensors {_position_shape(heads, tree)}, "
                f"got {got}"
            )
        shaped = part[None] if part.dim() == 2 else part
        fits = shaped.dim() == 3 and (shaped.shape[0] == 1 or shaped.shape[0] == heads)
        if not fits or shaped.shape[1] != tree.num_nodes:
            raise ValueError(
                f"position_scores must have shape {_position_shape(heads, tree)}, "
                f"got {list(part.shape)}"
            )
        if part.device != query.device:
            raise ValueError(f"position_scores: is on {part.device}, query is on {query.device}")
        found.append(shaped)
    if found[0].shape[-1] != found[1].shape[-1]:
        raise ValueError(
            "position_scores must have one width P for both tensors, "
            f"got {found[0].shape[-1]} and {found[1].shape[-1]}"
        )
    return found[0], found[1]


def _position_shape(heads: int, tree: SignalTree) -> str:
    return f"[M, P] or [H or 1, M, P] with H = {heads} and M = {tree.num_nodes} nodes"


def _check_alpha(
    alpha: Any, tree: SignalTree, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    if isinstance(alpha, float) and alpha == 1:
        return None  # without a look at the tree's depth, for which a graph would be compiled
    depths = tree.max_depth
    takes = f"a number >= 1 or a tensor with one entry for each of the {depths} depths of families"
    if isinstance(alpha, Tensor):
        if not alpha.is_floating_point():
            raise TypeError(f"alpha must be {takes}, got a tensor of {alpha.dtype}")
        if alpha.dim() > 1 or (alpha.dim() == 1 and alpha.numel() < depths):
            raise ValueError(f"alpha must be {takes}, got shape {list(alpha.shape)}")
        values = alpha.detach()
        if has_values(values) and not bool(((values >= 1) & values.isfinite()).all()):
            raise ValueError(f"alpha must be {takes}, got {values.tolist()}")
        spread = alpha.expand(depths) if alpha.dim() == 0 else alpha[:depths]
        return spread.to(device=device, dtype=dtype)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(f"alpha must be {takes}, got {alpha!r}")
    if not (math.isfinite(alpha) and alpha >= 1):
        raise ValueError(f"alpha must be {takes}, got {alpha!r}")
    if alpha == 1:
        return None
    return torch.full((depths,), float(alpha), device=device, dtype=dtype)
