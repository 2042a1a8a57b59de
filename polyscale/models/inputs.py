"""The layout of a batch: read once from the arguments, used by every block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyscale.layers.row_cache import RowCache
from polyscale.ops.hkt.api import check_cu_seqlens
from polyscale.ops.layout import PackedLayout, Padding
from polyscale.ops.tracing import is_cheap_to_read


@dataclass(frozen=True)
class ModelInputs:
    """Padding, packing and past of a batch.

    Padded rows are left-aligned once, before the first block, and restored after the last.
    """

    padding: Padding | None
    cu_seqlens: Tensor | None
    past: RowCache | None  # of the first layer; all layers have the same tokens

    @classmethod
    def read(
        cls,
        embedded: Tensor,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        states: Sequence[RowCache] | None,
        kwargs: dict[str, Any],
    ) -> "ModelInputs":
        """Read the arguments of a forward call, and check that they agree."""
        if embedded.dim() != 3 or embedded.shape[1] == 0:
            raise ValueError(
                f"the input must have shape [B, T, C] with T >= 1, got {list(embedded.shape)}"
            )
        batch, length = embedded.shape[:2]
        if cu_seqlens is None:
            cu_seqlens = kwargs.get("cu_seq_lens_q")
        past = None if states is None or states[0].is_empty else states[0]
        padding = None
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, batch, length)
            if states is not None:
                raise ValueError(
                    "cu_seqlens must not be combined with past_key_values or use_cache, got both"
                )
            if attention_mask is not None and not bool(attention_mask.all()):
                raise ValueError("pass attention_mask or cu_seqlens, not both")
        elif attention_mask is not None:
            padding = cls._padding(attention_mask, batch, length, past)
        inputs = cls(padding, cu_seqlens, past)
        if kwargs.get("token_type_ids") is not None and bool(kwargs["token_type_ids"].any()):
            raise ValueError("token_type_ids must be 0: these models have no token types")
        if kwargs.get("position_ids") is not None:
            inputs._check_position_ids(kwargs["position_ids"], embedded)
        return inputs

    @staticmethod
    def _padding(
        attention_mask: Tensor, batch: int, length: int, past: RowCache | None
    ) -> Padding | None:
        columns = length + (0 if past is None else past.columns)
        if attention_mask.shape != (batch, columns):
            raise ValueError(
                f"attention_mask must have shape [B, T] = [{batch}, {columns}] (past tokens "
                f"included), got {list(attention_mask.shape)}"
            )
        mask = attention_mask[:, -length:] == 0
        # Without a synchronisation, a mask without padding can be dropped.
        return None if is_cheap_to_read(mask) and not bool(mask.any()) else Padding.from_mask(mask)

    def _check_position_ids(self, position_ids: Tensor, embedded: Tensor) -> None:
        own = self.positions(embedded, None)
        if self.padding is None:
            wrong = bool((position_ids != own).any())
        else:
            offset = 0 if self.past is None or self.past.lengths is None else self.past.lengths
            column_position = self.padding.position + (
                offset[:, None] if isinstance(offset, Tensor) else 0
            )
            wrong = bool(((position_ids != column_position) & self.padding.real).any())
        if wrong:
            raise ValueError(
                "position_ids must count each sequence's real tokens from 0: positions follow "
                "from attention_mask, or from cu_seqlens for packed sequences"
            )

    @property
    def lengths(self) -> Tensor | None:
        """Real tokens per row, `[B]`; None if all are."""
        return None if self.padding is None else self.padding.lengths

    def line_up(self, x: Tensor) -> Tensor:
        """Left-align the real tokens."""
        return x if self.padding is None else self.padding.line_up(x)

    def put_back(self, x: Tensor) -> Tensor:
        """Restore tokens to their columns, with zeros at padding."""
        return x if self.padding is None else self.padding.put_back(x)

    def put_back_matrix(self, attention: Tensor) -> Tensor:
        """Restore the rows and columns of an attention matrix `[B, H, T, T]`."""
        if self.padding is None:
            return attention
        rows = self.padding.put_back(attention)
        return self.padding.put_back(rows.transpose(2, 3)).transpose(2, 3)

    def positions(self, x: Tensor, limit: int | None) -> Tensor:
        """The position of each aligned token in its own sequence, `[T]` or `[B, T]`."""
        position = torch.arange(x.shape[1], device=x.device)
        if self.cu_seqlens is not None:
            position = PackedLayout.from_cu_seqlens(self.cu_seqlens, levels=1).position
        if self.past is not None and self.past.lengths is not None:
            position = self.past.lengths[:, None] + position
        if limit is None:
            return position
        columns = x.shape[1] + (0 if self.past is None else self.past.columns)
        if columns > limit:
            longest = self._longest(position)
            if longest > limit:
                raise ValueError(
                    f"sequences must have at most max_position_embeddings={limit} tokens, got "
                    f"{longest}"
                )
        # Padding at the end of a row reads an arbitrary embedding, whose result is dropped.
        return position.clamp(max=limit - 1)

    def _longest(self, position: Tensor) -> int:
        if self.padding is None:
            return int(position.max()) + 1
        past = 0 if self.past is None or self.past.lengths is None else self.past.lengths
        return int((self.padding.lengths + past).max())
