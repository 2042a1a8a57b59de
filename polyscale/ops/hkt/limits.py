"""What the fused kernels of HKT attention, native and Triton, are written for."""

from collections.abc import Sequence

from torch import Tensor

MAX_LEVELS = 5  # the native kernel is compiled with this number
MAX_WIDTH = 256  # of a head's queries and keys, and of its values


def why_beyond_limits(
    queries: Sequence[Tensor], value: Tensor, relative_bias: Sequence[Tensor] | None
) -> str | None:
    """Why no kernel of ours takes these tensors, whatever it runs on; None if one may."""
    if relative_bias is not None:
        return "it takes no relative_bias; impl='sdpa' takes it"
    if len(queries) > MAX_LEVELS:
        return f"it takes at most {MAX_LEVELS} levels, got {len(queries)}"
    width = max(queries[0].shape[-1], value.shape[-1])
    if width > MAX_WIDTH:
        return f"it takes head dimensions up to {MAX_WIDTH}, got {width}"
    return None
