"""The kernel as a torch operation, and without the detour through the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyscale.ops.levels.native import library
from polyscale.ops.levels.native.library import ARRAYS, StoreView
from polyscale.ops.levels.settings import EXACT, LevelSettings
from polyscale.ops.tracing import has_values

if TYPE_CHECKING:
    from polyscale.ops.levels.reference import Opening
    from polyscale.ops.levels.store import LevelStore

MAX_WIDTH = 512


def why_not_attend(query: Tensor, store: LevelStore, opening: Opening, scale: float) -> str | None:
    """Why the kernel cannot take these; None if it can."""
    # A view was made of a store that the kernel takes.
    if store.native is None:
        reason = _why_not_store(store)
        if reason is not None:
            return reason
    if query.dtype != store.dtype:
        return f"query must be {store.dtype} like the store, got {query.dtype}"
    if query.requires_grad and torch.is_grad_enabled():
        return "it has no gradients: call it under torch.no_grad()"
    if store.longest == 0:
        return "it takes a store that holds tokens"
    return None


def why_not_append(store: LevelStore, key: Tensor, value: Tensor) -> str | None:
    """Why the kernel cannot append these; None if it can."""
    if not has_values(key, value):
        return "it reads memory, which fake tensors and other subclasses need not have"
    return _why_not_store(store)


def _why_not_store(store: LevelStore) -> str | None:
    if store.lengths.device.type != "cpu":
        return f"it runs on the CPU, got tensors on {store.lengths.device}"
    if store.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, got {store.dtype}"
    if max(store.width, store.value_width) > MAX_WIDTH:
        return f"it takes head dimensions up to {MAX_WIDTH}"
    return None


def attend(query: Tensor, store: LevelStore, opening: Opening, scale: float) -> Tensor:
    """The attended values, `[B, H, Q, Dv]`."""
    if (type(query) is not Tensor and not has_values(query)) or torch.compiler.is_compiling():
        return attend_with_choice(query, store, opening, scale)[0]
    output = _empty_output(query, store.value_width)
    library.attend(_view(store), query, output, store.longest, opening.numbers, scale)
    return output


def attend_with_choice(
    query: Tensor, store: LevelStore, opening: Opening, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Also the tokens opened besides near and first ones, `[B, Hk, Q, room]`, and how many."""
    settings = store.settings
    about = [*settings.bits, EXACT.index(settings.exact), settings.sinks]
    about += [store.width, store.value_width, store.longest, opening.near, opening.heavy]
    arrays = [getattr(store, name) for name in ARRAYS]
    return _attend(query, arrays, store.lengths, about, opening.numbers[2], scale)


def append(store: LevelStore, key: Tensor, value: Tensor, real: Tensor | None) -> None:
    """Write new tokens into a store that has room for them."""
    library.append(_view(store), key, value, real)


def _view(store: LevelStore) -> StoreView:
    """The store for the library, made once for the same arrays."""
    view = store.native
    if view is None or view.kept[4] is not store.keys or view.kept[-1] is not store.lengths:
        arrays = [getattr(store, name) for name in ARRAYS]
        view = StoreView(arrays, store.lengths, store.settings, store.width, store.value_width)
        store.native = view
    return view


@torch.library.custom_op("polyscale::level_attention", mutates_args=(), device_types="cpu")
def _attend(
    query: Tensor,
    arrays: list[Tensor],
    lengths: Tensor,
    about: list[int],
    mass: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    key_bits, value_bits, exact, sinks, width, value_width, longest, near, heavy = about
    settings = LevelSettings((key_bits, value_bits), EXACT[exact], sinks)
    view = StoreView(arrays, lengths, settings, width, value_width)
    output, opened, counts = _empty_results(query, arrays, about, mass)
    chosen = (near, heavy, mass)
    library.attend(view, query, output, longest, chosen, scale, (opened, counts))
    return output, opened, counts


@_attend.register_fake
def _(
    query: Tensor,
    arrays: list[Tensor],
    lengths: Tensor,
    about: list[int],
    mass: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(query, arrays, about, mass)


def _empty_results(
    query: Tensor, arrays: list[Tensor], about: list[int], mass: float
) -> tuple[Tensor, Tensor, Tensor]:
    value_width, longest, heavy = about[5], about[6], about[8]
    room = min(heavy, longest) if mass < 0 else longest
    shape = (*arrays[0].shape[:2], query.shape[2])
    opened = query.new_full((*shape, room), -1, dtype=torch.int32)
    counts = query.new_zeros(shape, dtype=torch.int32)
    return _empty_output(query, value_width), opened, counts


def _empty_output(query: Tensor, value_width: int) -> Tensor:
    batch, heads, count, width = query.shape
    if count == 1:
        if value_width == width:
            return torch.empty_like(query)
        return query.new_empty((batch, heads, 1, value_width))
    # Heads side by side, as the projection after the attention reads them.
    return query.new_empty(batch, count, heads, value_width).transpose(1, 2)
