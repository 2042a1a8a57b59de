"""Other efficient attentions as layers, `[1, N, d_model]` to the same, for comparison.

They are imported when a benchmark runs; one that is not installed is listed with the reason. None
computes the same function: their notes say what they leave out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.timing import best_seconds, milliseconds


class Peer(NamedTuple):
    """A layer to time, or the reason why it is not available."""

    name: str
    run: Callable[[Tensor], Tensor] | None
    note: str


def peers(length: int, d_model: int, num_heads: int) -> list[Peer]:
    """All peers for self-attention over `length` positions, bidirectional.

    >>> [peer.name for peer in peers(64, 32, 2)][:2]
    ['softmax attention', 'plain einsum']
    """
    builders: list[tuple[str, str, Callable[[int, int, int], Callable[[Tensor], Tensor]]]] = [
        ("softmax attention", "exact, scaled_dot_product_attention", _softmax),
        ("plain einsum", "exact, materialises N x N", _einsum),
        ("local-attention", "windows of 128 and their neighbours only", _local),
        ("linformer", "keys projected to 256, fixed length", _linformer),
        ("performer-pytorch", "random features in place of softmax", _performer),
        (
            "h-transformer-1d",
            "as published it sees only part of the sequence: labelled wrong",
            _h_transformer,
        ),
        ("Longformer", "window of 256, no global tokens", _longformer),
        ("BigBird", "blocks of 64: window, random and global", _big_bird),
    ]
    found = []
    for name, note, build in builders:
        try:
            with torch.no_grad():
                found.append(Peer(name, build(length, d_model, num_heads), note))
        except ImportError as error:
            found.append(Peer(name, None, f"not installed: {error.name}"))
    return found


def positions_seen(run_layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The share of input positions on which the middle of the output depends, by its gradient."""
    x = x.detach().requires_grad_()
    output = run_layer(x)
    (gradient,) = torch.autograd.grad(output[0, x.shape[1] // 2].square().sum(), x)
    return float((gradient[0].abs().sum(-1) > 0).float().mean())


class _Projected(nn.Module):
    """Projections around an attention on `[1, H, N, D]`."""

    def __init__(
        self, d_model: int, num_heads: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*parts.unbind(0)).transpose(1, 2).flatten(2))


def _softmax(length: int, d_model: int, num_heads: int) -> Callable[[Tensor], Tensor]:
    return _Projected(d_model, num_heads, nn.functional.scaled_dot_product_attention)


def _einsum(length: int, d_model: int, num_heads: int) -> Callable[[Tensor], Tensor]:
    if length > 8192:
        raise ImportError("N x N scores of this length", name=f"scores for N = {length}")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", query, key) * query.shape[-1] ** -0.5
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), value)

    return _Projected(d_model, num_heads, attend)


def _local(length: int, d_model: int, num_heads: int) -> Callable[[Tensor], Tensor]:
    made = import_module("local_attention").LocalAttention(
        dim=d_model // num_heads, window_size=128, causal=False, autopad=True
    )
    return _Projected(d_model, num_heads, made)


def _linformer(length: int, d_model: int, num_heads: int) -> Callable[[Tensor], Tensor]:
    return import_module("linformer").LinformerSelfAttention(
        dim=d_model, seq_len=length, heads=num_heads, k=256
    )


def _performer(length: int, d_model: int, num_heads: int) -> Callable[[Tensor], Tensor]:
    made = import_module("performer_pytorch").FastAttention(
        dim_heads=d_model // num_heads, causal=False
    )
    return _Projected(d_model, num_heads, made)


def _h_transformer(length: int, d_model: int, num_heads: int) -> Callable[[Tensor], Tensor]:
    module = import_module("h_transformer_1d.h_transformer_1d")
    return module.HAttention1D(d_model, heads=num_heads, dim_head=d_model // num_heads)


def _longformer(length: int, d_model: int, num_heads: int) -> Callable[[Tensor], Tensor]:
    module = import_module("transformers.models.longformer.modeling_longformer")
    config = module.LongformerConfig(
        hidden_size=d_model, num_attention_heads=num_heads, attention_window=[256]
    )
    layer = module.LongformerSelfAttention(config, 0).eval()

    def run(x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[:2])
        nothing = torch.zeros(x.shape[:2], dtype=torch.bool)
        return layer(
            x,
            attention_mask=mask,
            is_index_masked=nothing,
            is_index_global_attn=nothing,
            is_global_attn=False,
        )[0]

    return run


def _big_bird(length: int, d_model: int, num_heads: int) -> Callable[[Tensor], Tensor]:
    module = import_module("transformers.models.big_bird.modeling_big_bird")
    config = module.BigBirdConfig(
        hidden_size=d_model,
        num_attention_heads=num_heads,
        max_position_embeddings=length,
        block_size=64,
        num_random_blocks=3,
    )
    layer = module.BigBirdBlockSparseAttention(config, seed=0).eval()
    make_masks = module.BigBirdModel.create_masks_for_block_sparse_attn
    blocked, band, source, target = make_masks(torch.ones(1, length), 64)

    def run(x: Tensor) -> Tensor:
        return layer(
            x,
            band_mask=band,
            from_mask=source,
            to_mask=target,
            from_blocked_mask=blocked,
            to_blocked_mask=blocked,
        )[0]

    return run


def compare_with_peers(
    ours: dict[str, Callable[[Tensor], Tensor]], size: int, d_model: int, heads: int, rounds: int
) -> list[dict[str, Any]]:
    """Whole layers, projections included, forward: this library's and every peer."""
    x = torch.randn(1, size, d_model)
    runs, notes = dict(ours), dict.fromkeys(ours, "this library")
    for peer in peers(size, d_model, heads):
        notes[peer.name] = peer.note
        if peer.run is not None:
            runs[peer.name] = peer.run
    with torch.no_grad():
        seconds = best_seconds({name: partial(run, x) for name, run in runs.items()}, rounds)
    return [
        {
            "layer": name,
            "size": size,
            "seconds": seconds.get(name),
            "positions_seen": positions_seen(runs[name], x) if name in runs else None,
            "note": note,
        }
        for name, note in notes.items()
    ]


def peer_lines(rows: Sequence[dict[str, Any]], length: str) -> list[str]:
    """The comparison as Markdown; `length` is the letter for it."""
    lines = [
        "Peers compute other functions; the share of the input that the middle of the output "
        "depends on is measured by its gradient.",
        "",
        f"| layer | {length} | time | sees | note |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        taken = "-" if row["seconds"] is None else milliseconds(row["seconds"])
        seen = "-" if row["positions_seen"] is None else f"{row['positions_seen']:.0%}"
        lines.append(f"| {row['layer']} | {row['size']:,} | {taken} | {seen} | {row['note']} |")
    return lines
