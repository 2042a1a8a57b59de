"""`opened_attention`: checks the arguments and calls an implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from polyscale.checks import check_flag, check_integer, check_number
from polyscale.ops.backends import Backend, Operation
from polyscale.ops.hkt.checks import check_cu_seqlens, check_padding_mask
from polyscale.ops.native.backend import native_backend
from polyscale.ops.opened.audit import Audit
from polyscale.ops.opened.flex import opened_attention_flex, why_no_flex
from polyscale.ops.opened.fused import opened_attention_native, why_unsupported
from polyscale.ops.opened.native.library import LIBRARY
from polyscale.ops.opened.places import Places, sink_columns
from polyscale.ops.opened.reference import opened_attention_reference
from polyscale.ops.opened.settings import check_settings


def _preferred(query: Tensor, *_: object) -> tuple[str, ...]:
    """On a GPU compiled kernels, elsewhere ours."""
    return ("flex", "reference") if query.device.type == "cuda" else ("native", "reference")


OPERATION = Operation(
    "opened_attention",
    (
        Backend("reference", opened_attention_reference, "dense, any dtype, memory N^2"),
        native_backend(
            LIBRARY,
            opened_attention_native,
            "fused, CPU, float32 and bfloat16, memory linear in N",
            why_unsupported,
        ),
        Backend(
            "flex",
            opened_attention_flex,
            "compiled flex_attention with a block mask, for GPUs; forward only on a CPU",
            why_unsupported=why_no_flex,
        ),
    ),
    preferred=_preferred,
)
OPERATIONS = (OPERATION,)


@overload
def opened_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = ...,
    block: int = ...,
    key_block: int = ...,
    near: int = ...,
    heavy: int = ...,
    mass: float | None = ...,
    sinks: int | Sequence[int] | Tensor = ...,
    sample: int = ...,
    rest: str = ...,
    strict: bool = ...,
    key_padding_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    scale: float | None = ...,
    impl: str = ...,
    return_audit: Literal[False] = ...,
) -> Tensor: ...


@overload
def opened_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = ...,
    block: int = ...,
    key_block: int = ...,
    near: int = ...,
    heavy: int = ...,
    mass: float | None = ...,
    sinks: int | Sequence[int] | Tensor = ...,
    sample: int = ...,
    rest: str = ...,
    strict: bool = ...,
    key_padding_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    scale: float | None = ...,
    impl: str = ...,
    return_audit: Literal[True],
) -> tuple[Tensor, Audit]: ...


def opened_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    block: int = 64,
    key_block: int = 16,
    near: int = 64,
    heavy: int = 512,
    mass: float | None = None,
    sinks: int | Sequence[int] | Tensor = 16,
    sample: int = 8,
    rest: str = "drop",
    strict: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
    return_audit: bool = False,
) -> Tensor | tuple[Tensor, Audit]:
    """Softmax attention over what matters of a long prompt: near keys, sinks, and heavy key blocks.

    A query block of `block` consecutive positions shares a view, and each of its rows is softmax
    over the keys of the view. Positions count from a row's first real token. Which key blocks are
    heavy is seen by every `sample`-th query, which is scored against all keys; the choice is a
    constant for gradients, and everything else is differentiated exactly.

    Unless `strict`, later queries of a block choose for earlier ones. That is right for a prompt,
    all of which is known, and wrong for training a language model or scoring a given text.

    Args:
        query: `[B, H, N, D]`, the last N positions.
        key: `[B, Hk, M, D]`, `M >= N`, Hk dividing H: query head h uses key head `h * Hk // H`.
        value: `[B, Hk, M, Dv]`.
        causal: whether a query sees only itself and what comes before it.
        block: positions that share a view; a multiple of `key_block` and of `sample`.
        key_block: keys that are opened together.
        near: so many keys before the block are seen (bidirectional: after it, too).
        heavy: so many keys are opened, those with the greatest mass; a multiple of `key_block`.
        mass: the share of the sampled rows' mass to keep, by as few heavy key blocks as it takes,
            in place of a number (`heavy` is ignored then).
        sinks: the first so many positions are seen, or these positions: `[P]`, or `[B, P]` (if
            packed one row per sequence) with -1 for none.
        sample: every so-manieth query is scored against all keys; the last one always is.
        rest: `"drop"` leaves out what is unseen; `"pool"` keeps, of every key block before the
            query block (bidirectional: of every one), the mean of its unseen keys and values.
        strict: whether only a query's own and earlier queries choose for it; a view then serves
            `sample` positions. Causal only.
        key_padding_mask: bool `[B, M]`, True for padding, on any side. Padding gives zeros.
        cu_seqlens: for sequences packed in one row (`B = 1`, `M = N`): `[0, n_1, n_1 + n_2, ..]`.
        scale: factor of the dot products, `1 / sqrt(D)` if None.
        impl: `"auto"`, or a name that `polyscale.implementations()` lists.
        return_audit: whether to return what was chosen and lost, too.

    Returns:
        `[B, H, N, Dv]`, and an `Audit` if asked for.

    Example:
        >>> import torch, polyscale as ps
        >>> query, key = torch.randn(1, 4, 500, 16), torch.randn(1, 2, 500, 16)
        >>> output, audit = ps.opened_attention(query, key, key, heavy=128, return_audit=True)
        >>> output.shape, audit.opened.shape
        (torch.Size([1, 4, 500, 16]), torch.Size([1, 2, 8, 32]))
    """
    _check_tensors(query, key, value)
    check_flag("return_audit", return_audit)
    settings = check_settings(
        causal=causal,
        block=block,
        key_block=key_block,
        near=near,
        heavy=heavy,
        mass=mass,
        sample=sample,
        rest=rest,
        strict=strict,
        scale=query.shape[3] ** -0.5 if scale is None else check_number("scale", scale),
    )
    places = _places(query, key, key_padding_mask, cu_seqlens)
    found = _check_sinks(sinks, places)
    places = replace(places, sinks=sink_columns(places, found))
    chosen = OPERATION.choose(impl, query, key, value, places, settings)
    output, choice = chosen.run(query, key, value, places, settings)
    if not return_audit:
        return output
    return output, Audit.of(choice, query.shape[1], places, settings)


def _places(
    query: Tensor, key: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None
) -> Places:
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    if cu_seqlens is None:
        if key_padding_mask is not None:
            check_padding_mask(key_padding_mask, batch, keys, query.device)
        return Places.of_rows(batch, queries, keys, key_padding_mask, query.device)
    if key_padding_mask is not None:
        raise ValueError(
            "pass key_padding_mask or cu_seqlens, not both: packed rows have no padding"
        )
    if queries != keys:
        raise ValueError(
            f"query must have as many positions as key if cu_seqlens is given, {keys}, "
            f"got {queries}"
        )
    check_cu_seqlens(cu_seqlens, batch, keys)
    return Places.packed(cu_seqlens, query.device)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [B, H, N, D], got shape {tuple(tensor.shape)}"
            )
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be of a floating dtype, got {tensor.dtype}")
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query, {query.device}, got {tensor.device}"
            )
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} must have the batch size of query, {query.shape[0]}, got {tensor.shape[0]}"
            )
        if 0 in tensor.shape[1:]:
            raise ValueError(
                f"{name} must have at least one head, position and channel, "
                f"got shape {tuple(tensor.shape)}"
            )
    if key.shape[3] != query.shape[3]:
        raise ValueError(
            f"key must have the head dimension of query, {query.shape[3]}, got {key.shape[3]}"
        )
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value must have the heads and positions of key, {tuple(key.shape[1:3])}, "
            f"got {tuple(value.shape[1:3])}"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query must have a multiple of the heads of key, {key.shape[1]}, got {query.shape[1]}"
        )
    if query.shape[2] > key.shape[2]:
        raise ValueError(
            f"query must have at most as many positions as key, {key.shape[2]}, "
            f"got {query.shape[2]}; the queries are the last positions"
        )


def _check_sinks(sinks: int | Sequence[int] | Tensor, places: Places) -> int | Tensor:
    if not isinstance(sinks, Tensor | Sequence):
        return check_integer("sinks", sinks, least=0, hint="or give positions")
    if not isinstance(sinks, Tensor):
        sinks = torch.tensor([check_integer("sinks", x, least=-1) for x in sinks])
        sinks = sinks.to(torch.int64)
    if sinks.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"sinks must be an int32 or int64 tensor of positions, got {sinks.dtype}")
    rows = places.position.shape[0]
    if places.boundaries is not None:
        rows = len(places.boundaries) - 1
    if sinks.dim() not in (1, 2) or (sinks.dim() == 2 and sinks.shape[0] not in (1, rows)):
        raise ValueError(
            f"sinks must be a number or positions [P] or [{rows}, P], got shape {list(sinks.shape)}"
        )
    sinks = sinks.to(torch.int64)
    return sinks if sinks.dim() == 2 else sinks[None]
