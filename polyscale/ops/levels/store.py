"""The arrays of a cache with levels of precision, and how they grow, shrink and move.

Rows of a batch hold their own tokens from place 0 on, without padding, and may differ in length.
Tokens `64 i` to `64 i + 63` of a row are a block: once they are all there, they are packed.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from polyscale.ops.levels import blocks
from polyscale.ops.levels.append import APPEND
from polyscale.ops.levels.packing import BLOCK, VALUE_GROUP, kept_dtype, padded
from polyscale.ops.levels.settings import EXACT, LevelSettings

# Blocks by which a store grows at least; a larger one grows by an eighth.
ROOM = 4
# Of keys and values, in the order of their numbers in a saved state.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(eq=False)
class LevelStore:
    """Keys and values at two levels of precision; see `docs/levels.md` for a picture.

    `N` blocks have room, `D` and `Dv` channels are padded to 16. Arrays that a setting has no use
    for are empty.

    Example:
        >>> store = LevelStore.empty(1, 2, 64)
        >>> store.append(torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64))
        >>> store.lengths.tolist(), store.blocks
        ([100], 6)
    """

    settings: LevelSettings
    width: int
    value_width: int
    dtype: torch.dtype  # of the keys and values that come
    lengths: Tensor  # [B] int64, tokens of each row
    key_codes: Tensor  # [B, H, N, D / 8, 4, 64] uint8
    key_scales: Tensor  # [B, H, N, 2, D] float16: lo, step
    value_codes: Tensor  # [B, H, N, 2 bits, Dv / 16, 64] uint8
    value_scales: Tensor  # [B, H, N, 1 or 2 Dv / 32, 64] float16: scales, or (lo, step)
    # exact="model": [B, H, 64 N, D]; "8bit": [B, H, 64, D], the block that is not packed yet, of
    # float16 (bfloat16 if tokens come as such)
    keys: Tensor
    values: Tensor
    key_rest: Tensor  # "8bit": [B, H, 64 N, D / 2] uint8, the lower halves of the bytes
    value_rest: Tensor  # "8bit": [B, H, 64 N, Dv / 2] uint8; at 2 bits [.., Dv] int8, whole bytes
    rest_scales: Tensor  # "8bit" at 2 bits: [B, H, N, 64] float16, scales of value_rest
    sink_keys: Tensor  # "8bit": [B, H, sinks, D], likewise, the keys that no scale spans
    longest: int = 0  # of the lengths, known without a look at them
    native: Any = field(default=None, repr=False)  # what the kernel keeps about the arrays

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        width: int,
        value_width: int | None = None,
        *,
        settings: LevelSettings | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        room: int = 0,
    ) -> "LevelStore":
        """No tokens yet; `room` tokens fit in before it grows."""
        settings = settings or LevelSettings()
        value_width = width if value_width is None else value_width
        count = (room + BLOCK - 1) // BLOCK
        shapes = array_shapes(settings, batch, heads, width, value_width, count)
        exact = kept_dtype(dtype) if settings.is_8bit else dtype
        with torch.inference_mode(False):  # what is made there cannot be written to elsewhere
            arrays = {
                name: torch.empty(shape, dtype=kept or exact, device=device)
                for name, (shape, kept) in shapes.items()
            }
            lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(settings, width, value_width, dtype, lengths, **arrays, longest=0, native=None)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes: not the addresses of these arrays."""
        return {**self.__dict__, "native": None}

    @property
    def batch(self) -> int:
        """Rows."""
        return self.key_codes.shape[0]

    @property
    def heads(self) -> int:
        """Heads of keys."""
        return self.key_codes.shape[1]

    @property
    def blocks(self) -> int:
        """Blocks there is room for."""
        return self.key_codes.shape[2]

    def arrays(self) -> dict[str, Tensor]:
        """All arrays but the lengths, by name."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def append(
        self, key: Tensor, value: Tensor, real: Tensor | None = None, impl: str = "auto"
    ) -> None:
        """Add tokens `[B, H, N, D]` and `[B, H, N, Dv]` to every row, in constant time per token.

        Args:
            key: after rotary positions.
            value: the values.
            real: `[B, N]` bool, which of them are tokens; the others, padding, are left out.
            impl: `"auto"`, `"reference"` or `"native"`; both write the same bits.
        """
        self._check_new(key, value, real)
        counts = None if real is None else real.sum(1)
        longest = self.longest + key.shape[2]
        if counts is not None:
            longest = int((self.lengths + counts).max()) if self.batch else 0
        backend = APPEND.choose(impl, self, key, value)
        self.reserve(longest)
        backend.run(self, key.detach(), value.detach(), real)
        self.lengths += key.shape[2] if counts is None else counts
        self.longest = longest

    def _check_new(self, key: Tensor, value: Tensor, real: Tensor | None) -> None:
        for name, x, width in (("key", key, self.width), ("value", value, self.value_width)):
            if x.dim() != 4 or x.shape != (self.batch, self.heads, key.shape[2], width):
                raise ValueError(
                    f"{name} must be [{self.batch}, {self.heads}, N, {width}] like the store, got "
                    f"{list(x.shape)}"
                )
            if x.dtype != self.dtype or x.device != self.keys.device:
                raise ValueError(
                    f"{name} must be {self.dtype} on {self.keys.device} like the store, got "
                    f"{x.dtype} on {x.device}"
                )
        if real is not None and (real.shape != key.shape[::2] or real.dtype != torch.bool):
            raise ValueError(
                f"real must be bool {list(key.shape[::2])}, got {real.dtype} {list(real.shape)}"
            )

    def reserve(self, tokens: int) -> None:
        """Make room for rows of so many tokens, and at least an eighth more than there was."""
        needed = (tokens + BLOCK - 1) // BLOCK
        if needed <= self.blocks:
            return
        count = max(needed + ROOM, self.blocks + self.blocks // 8)
        shapes = array_shapes(
            self.settings, self.batch, self.heads, self.width, self.value_width, count
        )
        used = (self.longest + BLOCK - 1) // BLOCK
        for name, (shape, _) in shapes.items():
            old = getattr(self, name)
            if old.shape == torch.Size(shape):
                continue
            with torch.inference_mode(False):
                new = old.new_empty(shape)
            places = used if shape[2] == count else min(used * BLOCK, old.shape[2])
            new[:, :, :places] = old[:, :, :places]
            setattr(self, name, new)
        self.native = None

    def crop(self, length: "int | Tensor") -> None:
        """Keep at most `length` tokens of each row; a negative number takes so many away.

        A tensor `[B]` says it for each row. With `exact="8bit"`, what is left of a packed block
        becomes the block that is not packed yet, at the precision of its bytes.
        """
        if isinstance(length, Tensor):
            kept = length.to(self.lengths)
        elif length < 0:
            kept = self.lengths + length
        else:
            kept = torch.full_like(self.lengths, length)
        kept = torch.minimum(kept.clamp(min=0), self.lengths)
        if self.settings.is_8bit:
            for row, (before, after) in enumerate(
                zip(self.lengths.tolist(), kept.tolist(), strict=True)
            ):
                if before // BLOCK != after // BLOCK and after % BLOCK:
                    blocks.reopen(self, row, after // BLOCK)
        self.lengths.copy_(kept)
        self.longest = int(kept.max()) if self.batch else 0

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order: the beams that go on, or each row several times."""
        rows = rows.to(self.lengths.device)
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        if len(rows) == self.batch and rows.tolist() == list(range(self.batch)):
            return
        with torch.inference_mode(False):
            rows = rows.clone()
            for name in (*_ARRAYS, "lengths"):
                setattr(self, name, getattr(self, name).index_select(0, rows))
        self.longest = int(self.lengths.max()) if self.batch else 0
        self.native = None

    def repeat(self, repeats: int) -> None:
        """Each row `repeats` times, side by side."""
        self.select(torch.arange(self.batch).repeat_interleave(repeats))

    def to(self, device: torch.device | str) -> "LevelStore":
        """A store on another device."""
        moved = {name: getattr(self, name).to(device) for name in (*_ARRAYS, "lengths")}
        return LevelStore(
            self.settings,
            self.width,
            self.value_width,
            self.dtype,
            longest=self.longest,
            native=None,
            **moved,
        )

    def state(self) -> dict[str, Tensor]:
        """All there is as tensors, without the room for more: for `safetensors`, say."""
        used = (self.longest + BLOCK - 1) // BLOCK
        shapes = array_shapes(
            self.settings, self.batch, self.heads, self.width, self.value_width, used
        )
        kept = {
            name: array[:, :, : shapes[name][0][2]].clone(memory_format=torch.contiguous_format)
            for name, array in self.arrays().items()
        }
        settings = self.settings
        about = [*settings.bits, EXACT.index(settings.exact), settings.sinks]
        about += [self.width, self.value_width, DTYPES.index(self.dtype)]
        return {**kept, "lengths": self.lengths.clone(), "settings": torch.tensor(about)}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "LevelStore":
        """The store whose `state` this is; its arrays are taken as they are."""
        missing = [name for name in (*_ARRAYS, "lengths", "settings") if name not in state]
        about = state["settings"].tolist() if not missing else []
        if len(about) != 7 or state["lengths"].dim() != 1 or min(about) < 0:
            raise ValueError(
                f"state must be what LevelStore.state returned, got one without "
                f"{', '.join(missing) or 'its settings'}"
            )
        *bits, exact, sinks, width, value_width, dtype = about
        if exact >= len(EXACT) or dtype >= len(DTYPES):
            raise ValueError(f"state must be of this version of LevelStore, got settings {about}")
        settings = LevelSettings(tuple(bits), EXACT[exact], sinks)
        lengths = state["lengths"].clone()
        arrays = {name: state[name].contiguous() for name in _ARRAYS}
        longest = int(lengths.max()) if len(lengths) else 0
        found = cls(
            settings,
            width,
            value_width,
            DTYPES[dtype],
            lengths,
            **arrays,
            longest=longest,
            native=None,
        )
        found._check_arrays()
        return found

    def _check_arrays(self) -> None:
        """Refuse arrays that do not belong together: the kernel would read beyond their ends."""
        room = (self.longest + BLOCK - 1) // BLOCK
        batch, heads = len(self.lengths), self.heads if self.key_codes.dim() > 2 else 0
        sizes = batch, heads, self.width, self.value_width
        exact = kept_dtype(self.dtype) if self.settings.is_8bit else self.dtype
        negative = bool((self.lengths < 0).any())
        for name, (shape, dtype) in array_shapes(self.settings, *sizes, room).items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != (dtype or exact) or negative:
                raise ValueError(
                    f"state must hold {name} of {dtype or exact} {list(shape)} for tokens "
                    f"{self.lengths.tolist()}, got {array.dtype} {list(array.shape)}"
                )

    def bytes_held(self) -> int:
        """Bytes of the blocks that hold tokens, scales and all."""
        used = (self.longest + BLOCK - 1) // BLOCK
        shapes = array_shapes(
            self.settings, self.batch, self.heads, self.width, self.value_width, used
        )
        return sum(
            torch.Size(shape).numel() * getattr(self, name).element_size()
            for name, (shape, _) in shapes.items()
        )

    def bytes_allocated(self) -> int:
        """Bytes of all arrays, with the room for more."""
        return sum(array.numel() * array.element_size() for array in self.arrays().values())

    def bytes_read(self, opened: int) -> dict[str, int]:
        """Bytes that a query of one row and one head of keys reads: the coarse level, the opened.

        Args:
            opened: tokens it opens.
        """
        count = self.longest // BLOCK
        shapes = array_shapes(self.settings, 1, 1, self.width, self.value_width, count)

        def size(names: tuple[str, ...]) -> int:
            return sum(
                torch.Size(shapes[name][0]).numel() * getattr(self, name).element_size()
                for name in names
            )

        coarse = size(("key_codes", "key_scales", "value_codes", "value_scales"))
        exact = (self.width + self.value_width) * self.keys.element_size()
        if self.settings.is_8bit:
            exact = self.width + self.value_width  # a byte each, but for the newest and the first
        return {"coarse": coarse, "exact": opened * exact}


def array_shapes(
    settings: LevelSettings, batch: int, heads: int, width: int, value_width: int, count: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype of every array for `count` blocks; None: the dtype of the model."""
    wide, value_wide, bits = padded(width), padded(value_width), settings.value_bits
    eight, whole = settings.is_8bit, settings.is_8bit and bits == 2
    scales = 1 if bits == 4 else 2 * -(-value_width // VALUE_GROUP)
    rest = count * BLOCK * eight
    exact = BLOCK if eight else count * BLOCK
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {
        "key_codes": ((count, wide // 8, 4, 64), torch.uint8),
        "key_scales": ((count, 2, wide), torch.float16),
        "value_codes": ((count, 2 * bits, value_wide // 16, 64), torch.uint8),
        "value_scales": ((count, scales, BLOCK), torch.float16),
        "keys": ((exact, width), None),
        "values": ((exact, value_width), None),
        "key_rest": ((rest, wide // 2), torch.uint8),
        "value_rest": ((rest, value_wide if whole else value_wide // 2), torch.uint8),
        "rest_scales": ((count * whole, BLOCK), torch.float16),
        "sink_keys": ((settings.sinks * eight, width), None),
    }
    if whole:
        shapes["value_rest"] = (shapes["value_rest"][0], torch.int8)
    return {name: ((batch, heads, *shape), kept) for name, (shape, kept) in shapes.items()}


_ARRAYS = tuple(
    field.name for field in fields(LevelStore) if field.type is Tensor and field.name != "lengths"
)
