"""FLOPs of a forward pass, counted while the model runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from polyscale.layers.hkt import HKTAttention
from polyscale.ops.hkt.api import ATTENTION
from polyscale.ops.layout import level_length


def count_forward_flops(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """FLOPs of `model(**batch)`, without gradients; a multiplication and an addition are two.

    Counted are the products of matrices and convolutions that run, attention among them, as
    torch's own counter does; sums, norms, activations and filters of single channels are not.
    Masked pairs (causal, padding) count as if they were computed, so give a batch of full length.

    HKT attention counts what it is defined to cost, every level at its own resolution, whichever
    implementation the model uses: `impl="sdpa"` computes the same with L times the products.

    >>> from torch import nn
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(4, 3)
    ...     def forward(self, x):
    ...         return self.layer(x)
    >>> count_forward_flops(Model(), {"x": torch.zeros(5, 4)})  # 2 * 5 * 4 * 3
    120
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batch must be a dict of the model's arguments, got {type(batch).__name__}"
        )
    model = getattr(model, "_orig_mod", model)  # operations of compiled code are not counted
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    with torch.no_grad(), _evaluating(model), _plain_attention(model), counter:
        model(**batch)
    return counter.get_total_flops()


def _formulas() -> dict[Any, Any]:
    """Attention that runs as one operation, for which torch's counter has no formula."""
    return {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops,
        torch.ops.polyscale.hkt_attention: _native_flops,
        torch.ops.polyscale.hkt_triton: _triton_flops,
    }


def _cpu_attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **options: Any
) -> int:
    return sdpa_flop_count(query, key, value)


def _native_flops(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    weights: Tensor,
    lengths: Tensor | None,
    boundaries: Tensor | None,
    *rest: Any,
    out_val: Any = None,
) -> int:
    # Sequences packed in one row do not see each other; boundaries[0] are their ends.
    packed = None if boundaries is None else boundaries[0].diff().tolist()
    return _hkt_flops(queries, value, packed)


def _triton_flops(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    weights: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    *rest: Any,
    out_val: Any = None,
) -> int:
    packed = None if starts is None or lengths is None else lengths.tolist()
    return _hkt_flops(queries, value, packed)


# These two need the tensors themselves: shapes do not show how sequences are packed.
_native_flops._get_raw = True  # type: ignore[attr-defined]
_triton_flops._get_raw = True  # type: ignore[attr-defined]


def _hkt_flops(queries: Sequence[Tensor], value: Tensor, packed: list[int] | None) -> int:
    """Scores of every level at its own resolution, and one product with the values."""
    batch, heads, length, value_width = value.shape
    width = queries[0].shape[-1]
    pairs = 0  # times the width of what is multiplied
    for size in [length] if packed is None else packed:
        levels = range(len(queries))
        pairs += sum(level_length(size, level) ** 2 for level in levels) * width
        pairs += size**2 * value_width
    return 2 * batch * heads * pairs


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout, and no fused encoder layer, whose operations the counter does not see."""
    training = [module for module in model.modules() if module.training]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module in training:
            module.training = True


@contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """HKT layers run an implementation with exactly the products of the definition."""
    layers = [module for module in model.modules() if isinstance(module, HKTAttention)]
    before = [layer.impl for layer in layers]
    try:
        for layer in layers:
            layer.impl = _countable(layer)
        yield
    finally:
        for layer, impl in zip(layers, before, strict=True):
            layer.impl = impl


def _countable(layer: HKTAttention) -> str:
    if layer.impl == "triton":
        return "triton"
    probe = layer.v_proj.weight.new_empty(1, 1, 1, layer.head_dim)
    levels = [probe] * layer.levels
    # The reference needs memory of T x T, so it comes second.
    bias = list(layer.relative_bias) or None
    given = (levels, levels, probe, layer.level_weights)
    native = ATTENTION.why_not("native", *given, relative_bias=bias) is None
    return "native" if native else "reference"
