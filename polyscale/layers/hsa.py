"""Hierarchical Self-Attention as layers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyscale.checks import check_choice, check_integer, check_number
from polyscale.layers.hsa_cache import HSACache
from polyscale.layers.positions import rotate
from polyscale.ops.hsa import hsa_attention, hsa_extend, hsa_step
from polyscale.ops.tracing import has_only_a_shape
from polyscale.trees import SignalTree

MAX_DEPTH = 32  # families at this depth and below share one learned alpha
ATTENTIONS = ("hierarchical", "none")


def check_heads(d_model: int, num_heads: int, rotary: bool) -> None:
    """Raise unless the width divides into heads, which must be even to be rotated."""
    check_integer("num_heads", num_heads, least=1)
    check_integer("d_model", d_model, least=1)
    if d_model % num_heads:
        raise ValueError(f"d_model must be a multiple of num_heads, got {d_model} and {num_heads}")
    if rotary and d_model // num_heads % 2:
        raise ValueError(
            f"d_model / num_heads must be even with rotary=True, got {d_model // num_heads}"
        )


def check_modalities(modalities: Sequence[str]) -> None:
    """Raise unless there is at least one, and none twice."""
    if not modalities:
        raise ValueError("modalities must name at least one, got none")
    if len(set(modalities)) != len(modalities):
        raise ValueError(f"modalities must differ, got {list(modalities)}")


def check_input(x: Tensor, d_model: int) -> None:
    """Raise unless x is a floating tensor `[B, N, d_model]` or `[N, d_model]`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"x must be a floating tensor, got {got}")
    if x.dim() not in (2, 3) or x.shape[-1] != d_model:
        raise ValueError(
            f"x must have shape [B, N, d_model] or [N, d_model] with d_model = {d_model}, "
            f"got {tuple(x.shape)}"
        )


class HSAAttention(nn.Module):
    """Multi-head self-attention of the leaves of a tree, `[B, N, d_model]` to the same.

    Queries and keys are normalised per head, after the projection and without a learned scale.
    All then have the same length, so that the paper's energy (half the squared distance between
    a query and a key) and their dot product differ by a constant.

    Args:
        d_model: width of the input.
        num_heads: heads; each has `d_model / num_heads` channels.
        tie: `"blocks"` (the paper's) or `"columns"` (closer to softmax; needed for `causal`).
        causal: whether a leaf sees only itself and what is left of it.
        include_self: whether a leaf attends to itself.
        modalities: names of the leaves' modalities; each has projections of its own.
        position_width: width of the node embeddings passed as `positions`; 0 for none. Each
            domain has a projection of its own.
        normalize: whether queries and keys are normalised.
        query_residual: add the queries to what was attended (the paper's layer).
        rotary: rotate queries and keys by their position in the sequence of leaves.
        alpha: 1 for softmax, more for sparse entmax families, `"learned"` for one value per
            depth between 1 and 2.
        bias: whether the projections have a bias.
        attention: `"none"` leaves the attention out (the DeepSet baseline).
        impl: see `polyscale.hsa_attention`.

    Example:
        >>> tree = SignalTree.from_windows(20, (4, 4))
        >>> HSAAttention(16, 2)(torch.randn(3, 20, 16), tree).shape
        torch.Size([3, 20, 16])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        tie: str = "blocks",
        causal: bool = False,
        include_self: bool = True,
        modalities: Sequence[str] = ("default",),
        position_width: int = 0,
        normalize: bool = True,
        query_residual: bool = False,
        rotary: bool = False,
        alpha: float | str = 1.0,
        bias: bool = True,
        attention: str = "hierarchical",
        impl: str = "auto",
    ) -> None:
        super().__init__()
        check_heads(d_model, num_heads, rotary)
        check_choice("attention", attention, ATTENTIONS)
        check_choice("tie", tie, ("blocks", "columns"))
        if causal and tie != "columns":
            raise ValueError(
                f"tie must be 'columns' with causal=True, got {tie!r}: with tied queries, later "
                "tokens would change earlier rows"
            )
        check_modalities(modalities)
        check_integer("position_width", position_width, least=0)
        if isinstance(alpha, str):
            check_choice("alpha", alpha, ("learned",), hint="or pass a number of at least 1")
        else:
            check_number("alpha", alpha, least=1, hint="or pass 'learned'")
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, d_model // num_heads
        self.tie, self.causal, self.include_self = tie, causal, include_self
        self.modalities, self.attention, self.impl = tuple(modalities), attention, impl
        self.normalize, self.query_residual, self.rotary = normalize, query_residual, rotary
        self.qkv_proj = nn.ModuleList(nn.Linear(d_model, 3 * d_model, bias) for _ in modalities)
        self.out_proj = nn.Linear(d_model, d_model, bias)
        self.position_proj = nn.ModuleDict()
        if position_width:
            for domain in SignalTree.DOMAINS:
                self.position_proj[domain] = nn.Linear(position_width, d_model, bias=False)
        self.fixed_alpha = None if alpha == "learned" else float(alpha)
        self.alpha_logits: nn.Parameter | None = None
        if alpha == "learned":
            self.alpha_logits = nn.Parameter(torch.zeros(MAX_DEPTH))

    def forward(
        self,
        x: Tensor,
        tree: SignalTree | None = None,
        key_padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: HSACache | None = None,
        closes: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: `[B, N, d_model]` with one tree of N rows for all, or a batched tree of B * N rows,
                one for each; or packed `[N, d_model]` with a batched tree. With a filled cache,
                the new tokens.
            tree: a SignalTree. Not needed with a filled cache.
            key_padding_mask: bool `[B, N]` (`[N]` if packed), True for rows to leave out.
            positions: node embeddings `[M, position_width]`, as `DomainPositions` makes them.
            cache: state of earlier calls, which this call extends.
            closes: with a cache: `[B, N]`, how many levels of the hierarchy close right before
                each token, counted from the leaves' families up.
            lengths: with a cache: `[B]`, how many tokens of each row are real; they come first.
        """
        check_input(x, self.d_model)
        if cache is not None:
            self._check_cache(x, cache, closes)
        if cache is not None and not cache.is_empty:
            assert closes is not None
            return self._continue(x, cache, closes, lengths)
        tree = self._check_tree(x, tree, cache)
        # Rows with a tree each are one packed row.
        rows = x.flatten(0, 1) if x.dim() == 3 and tree.num_rows != x.shape[1] else x
        query, key, value = self._project(rows, tree)
        if self.rotary and not has_only_a_shape(x):
            position = self._leaf_rank(tree, key_padding_mask)
            query, key = rotate(query, position), rotate(key, position)
        attended = query
        if self.attention != "none":
            attended = self._attend((query, key, value), rows, tree, key_padding_mask, positions)
        if cache is not None:
            assert closes is not None
            if lengths is None:
                lengths = torch.full((len(x),), x.shape[1], device=x.device)
            cache.start(self._by_row(key, x), self._by_row(value, x), closes, lengths)
        return self.out_proj(attended.transpose(1, 2).flatten(2)).view(x.shape)

    def _attend(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        rows: Tensor,
        tree: SignalTree,
        key_padding_mask: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        """The attended values, `[B, H, N, D]`, of queries, keys and values (`B = 1` if packed)."""
        packed = rows.dim() == 2
        query, key, value = (part.squeeze(0) if packed else part for part in projected)
        # Without values a tree cannot be read, and shapes do not depend on it.
        shape_only = has_only_a_shape(rows)
        attended = hsa_attention(
            query,
            key,
            value,
            tree,
            tie=self.tie,
            causal=self.causal,
            include_self=self.include_self,
            key_padding_mask=key_padding_mask,
            position_scores=None if shape_only else self._position_scores(tree, positions),
            alpha=self._alpha(tree),
            impl=self.impl,
        )
        attended = attended[None] if packed else attended
        return attended + projected[0] if self.query_residual else attended

    def _project(self, x: Tensor, tree: SignalTree | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, `[B, H, N, D]` each (`B = 1` if packed)."""
        if len(self.qkv_proj) == 1 or tree is None or has_only_a_shape(x):
            projected = self.qkv_proj[0](x)
        else:
            modality = self._row_modality(tree)  # [N]
            projected = self.qkv_proj[0](x)
            for number, projection in enumerate(self.qkv_proj):
                rows = (modality == number).nonzero().flatten()
                if number and rows.numel():
                    part = projection(x.index_select(-2, rows))
                    projected = projected.index_copy(-2, rows, part)
        if projected.dim() == 2:
            projected = projected[None]
        # Heads stay side by side, as the products before and after the attention have them.
        parts = projected.unflatten(-1, (3, self.num_heads, self.head_dim))  # [B, N, 3, H, D]
        both, value = parts[..., :2, :, :], parts[..., 2, :, :]
        if self.normalize:
            both = F.layer_norm(both, (self.head_dim,))
        query, key, value = (part.transpose(1, 2) for part in (*both.unbind(2), value))
        return query, key, value.to(query.dtype)

    def _by_row(self, part: Tensor, x: Tensor) -> Tensor:
        """Packed or not, as `[B, H, N, D]` for `x` `[B, N, d_model]`."""
        return part.transpose(1, 2).reshape(*x.shape[:2], *part.shape[1::2]).transpose(1, 2)

    def _row_modality(self, tree: SignalTree) -> Tensor:
        unknown = [name for name in tree.modality_names if name not in self.modalities]
        if unknown:
            raise ValueError(
                f"modalities must contain the tree's: {unknown} not in {list(self.modalities)}"
            )
        table = [self.modalities.index(name) for name in tree.modality_names]
        number = torch.tensor([*table, -1], device=tree.device)[tree.modality]  # [M]
        return torch.where(tree.row_node >= 0, number[tree.row_node.clamp(min=0)], 0)

    def _leaf_rank(self, tree: SignalTree, ignored: Tensor | None) -> Tensor:
        """Each row's position from the left in its own tree, `[N]`, or `[B, N]` with a mask."""
        rows = tree.leaf_row[tree.leaf_order]  # left to right
        counted = torch.ones(tree.num_rows, dtype=torch.bool, device=tree.device)
        counted = (counted if ignored is None else ~ignored)[..., rows].long()
        before = counted.cumsum(-1) - counted  # [..., leaves]
        starts = tree.leaf_begin[: tree.num_trees].contiguous()
        leaf = torch.arange(len(rows), device=tree.device)
        first = starts[torch.searchsorted(starts, leaf, right=True) - 1]  # of the leaf's tree
        rank = before - before[..., first]
        position = torch.zeros(*rank.shape[:-1], tree.num_rows, dtype=rank.dtype).to(rank.device)
        return position.index_copy(-1, rows, rank)

    def _position_scores(self, tree: SignalTree, positions: Tensor | None) -> Tensor | None:
        """`[H, M, D]`, by the projection of each parent's domain."""
        if not self.position_proj:
            if positions is not None:
                raise ValueError("positions must be None for a layer with position_width=0")
            return None
        if positions is None or positions.shape[0] != tree.num_nodes:
            got = None if positions is None else list(positions.shape)
            raise ValueError(f"positions must be [M, width] with M = {tree.num_nodes}, got {got}")
        domain = torch.where(tree.parent >= 0, tree.domain[tree.parent.clamp(min=0)], -1)
        projected = positions.new_zeros(tree.num_nodes, self.d_model)
        for code, name in enumerate(tree.DOMAINS):
            nodes = (domain == code).nonzero().flatten()
            if nodes.numel():
                part = self.position_proj[name](positions[nodes])
                projected = projected.to(part.dtype).index_copy(0, nodes, part)
        return projected.unflatten(-1, (self.num_heads, self.head_dim)).transpose(0, 1)

    def _alpha(self, tree: SignalTree) -> float | Tensor:
        if self.alpha_logits is None:
            assert self.fixed_alpha is not None
            return self.fixed_alpha
        depth = torch.arange(max(1, tree.max_depth), device=self.alpha_logits.device)
        return 1 + torch.sigmoid(self.alpha_logits[depth.clamp(max=MAX_DEPTH - 1)])

    def _continue(
        self, x: Tensor, cache: HSACache, closes: Tensor, lengths: Tensor | None
    ) -> Tensor:
        """Attention of new tokens over the open families and themselves."""
        cache.check_batch(len(x))
        query, key, value = self._project(x, None)
        assert cache.lengths is not None
        if self.rotary:
            position = cache.lengths[:, None] + torch.arange(x.shape[1], device=x.device)
            query, key = rotate(query, position), rotate(key, position)
        if lengths is None:
            lengths = torch.full((len(x),), x.shape[1], device=x.device)
        projected, scale = (query, key, value, cache.families), self.head_dim**-0.5
        if x.shape[1] == 1:
            # A step has no implementation of its own for "reference": torch's is its definition.
            impl = self.impl if self.impl in ("auto", "native") else "torch"
            rows = lengths > 0
            attended, families = hsa_step(
                *projected,
                closes[:, 0],
                rows,
                scale=scale,
                include_self=self.include_self,
                impl=impl,
            )
        else:
            attended, families = hsa_extend(
                *projected,
                closes,
                lengths,
                scale=scale,
                include_self=self.include_self,
                impl=self.impl,
            )
        cache.take(families, lengths, x.shape[1])
        if self.query_residual:
            attended = attended + query
        return self.out_proj(attended.transpose(1, 2).flatten(2))

    def _check_tree(self, x: Tensor, tree: SignalTree | None, cache: HSACache | None) -> SignalTree:
        """The tree, which must be given and have as many rows as x."""
        if tree is None:
            where = "" if cache is None else " for the first tokens of a cache"
            raise ValueError(f"tree must be given{where}, got None")
        if not isinstance(tree, SignalTree):
            raise TypeError(
                f"tree must be a SignalTree, got {tree!r}; windows of rows are "
                "SignalTree.from_windows(n, windows)"
            )
        if cache is None:
            rows, all_rows = x.shape[-2], x.shape[:-1].numel()
            # Not a set: a compiled graph would be made for these very numbers.
            if tree.num_rows != rows and tree.num_rows != all_rows:
                allowed = sorted({rows, all_rows})
                raise ValueError(
                    f"tree must have {' or '.join(str(n) for n in allowed)} rows for x of "
                    f"shape {tuple(x.shape)}, got {tree.num_rows}"
                )
        return tree

    def _check_cache(self, x: Tensor, cache: HSACache, closes: Tensor | None) -> None:
        """Raise where a cache would be wrong."""
        if not self.causal:
            raise ValueError(
                "cache must be None unless causal=True: "
                "otherwise later tokens would change earlier ones"
            )
        if self.fixed_alpha != 1.0:
            raise ValueError(
                "cache must be None unless alpha=1: sparse families cannot be decoded step by step"
            )
        if self.position_proj or len(self.qkv_proj) > 1:
            raise ValueError("cache must be None with node positions or several modalities")
        if x.dim() != 3 or closes is None or closes.shape != x.shape[:2]:
            got = None if closes is None else list(closes.shape)
            raise ValueError(
                f"closes must be [B, N] = {list(x.shape[:2])} with a cache, for x [B, N, d_model], "
                f"got {got}"
            )

    def extra_repr(self) -> str:
        """Shown by print."""
        return (
            f"{self.d_model}, num_heads={self.num_heads}, tie={self.tie!r}, "
            f"causal={self.causal}, modalities={self.modalities}"
        )


class HTELayer(nn.Module):
    """The hierarchical transformer encoder's layer.

    Attention with the residual on the queries, a linear map and a norm; then an MLP with a
    residual. Takes the options of `HSAAttention`.

    Example:
        >>> tree = SignalTree.from_nested([[0, 1, 2], [3, 4]])
        >>> HTELayer(16, 2)(torch.randn(5, 16), tree).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        intermediate_size: int | None = None,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        **attention: object,
    ) -> None:
        super().__init__()
        hidden = intermediate_size or 4 * d_model
        self.attention = HSAAttention(d_model, num_heads, query_residual=True, **attention)  # type: ignore[arg-type]
        self.norm = nn.LayerNorm(d_model, layer_norm_eps)
        self.mlp = nn.Sequential(nn.Linear(d_model, hidden), nn.GELU(), nn.Linear(hidden, d_model))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        tree: SignalTree,
        key_padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Leaves `[B, N, d_model]` or packed `[N, d_model]` to the same."""
        attended = self.attention(x, tree, key_padding_mask, positions)
        x = self.norm(self.dropout(attended))
        return x + self.dropout(self.mlp(x))
