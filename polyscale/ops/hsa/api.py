"""The public functions: `hsa_attention` and `hsa_matrix`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.hsa import reference
from polyscale.ops.hsa.blocks import blocks_attention
from polyscale.ops.hsa.checks import HSAOptions, PositionScores, Request, check_request
from polyscale.ops.hsa.columns import columns_attention
from polyscale.ops.hsa.context import AttentionContext
from polyscale.ops.hsa.decode import HSA_STEP
from polyscale.ops.hsa.energies import blocks_energy, columns_energy
from polyscale.ops.hsa.families import plans_of
from polyscale.ops.hsa.native import op
from polyscale.ops.hsa.native.build import LIBRARY
from polyscale.ops.hsa.native.plan import plan_in_graph, plan_of, tree_tensors
from polyscale.ops.native.backend import native_backend
from polyscale.ops.tracing import counts_flops, has_only_a_shape

if TYPE_CHECKING:
    from polyscale.trees import SignalTree

CHUNK_BYTES = 1 << 23  # of queries worked on at once when no gradient is asked for


@overload
def hsa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: SignalTree,
    *,
    return_lse: Literal[False] = False,
    impl: str = "auto",
    **options: Unpack[HSAOptions],
) -> Tensor: ...


@overload
def hsa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: SignalTree,
    *,
    return_lse: Literal[True],
    impl: str = "auto",
    **options: Unpack[HSAOptions],
) -> tuple[Tensor, Tensor]: ...


def hsa_attention(
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
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Hierarchical Self-Attention: the attention closest to softmax that a tree allows.

    Flat scores are `s_ij = scale * q_i . k_j + eps_q[B] . eps_k[C]`, where B and C are the highest
    distinct ancestors of the leaves i and j (siblings), and `s_ii = scale * q_i . k_i`. Among the
    matrices that obey the tie, the result uses the one with the least
    `sum_i KL(theta_i || softmax(s_i))`; a tree with one family gives softmax attention itself.

    Args:
        query: `[B, H, N, D]` with one tree for the whole batch, or packed `[H, N, D]` with the N
            rows of all trees of a batched tree one after the other.
        key: the same shape.
        value: the same but for its width.
        tree: a SignalTree with N rows. Rows that no leaf carries get zeros.
        tie: "blocks": one weight for each ordered pair of siblings (O(M b^2)); "columns": each
            leaf keeps its own query and sees a sibling C of an ancestor (or of itself) as one
            node of weight `|l(C)| exp(score on the mean key of C)` (O(N b log_b N), closer to
            softmax).
        causal: a leaf sees itself and what is left of it; nothing later enters its row. Only with
            tie="columns".
        include_self: whether a leaf attends to itself. A leaf that then has nothing to attend to
            gets zeros.
        key_padding_mask: bool `[B, N]` (`[N]` if packed), True for rows to leave out: they are
            neither query nor key and their output is zero, as if pruned from the tree.
        position_scores: embeddings of the nodes `[M, P]` or `[H or 1, M, P]`, as a pair
            (eps_q, eps_k) or one tensor for both; their dot product is added to the score of
            sibling B on sibling C after scaling.
        scale: of the dot products; `1 / sqrt(D)` unless given.
        alpha: 1 is softmax, more is sparse alpha-entmax in each family; a tensor has one entry
            per depth of the families' parents and may require a gradient.
        enable_gqa: whether key and value may have fewer heads than the query, a divisor of its
            number: query heads in turn share one.
        return_lse: whether to return `(output, lse)`, where lse is in float32 at least and may be
            differentiated. For tie="columns" it is `log Z` of every row, `[B, H, N]`, over all
            that the row sees; for tie="blocks" minus the energy of every root, `[B, H, trees]`.
            Minus infinity where nothing is seen. With it attention over parts can be merged.
        impl: "auto", "native" (a kernel for the CPU, alpha = 1), "torch" or "reference" (dense and
            slow: the definition). The kernel has first derivatives; gradients of gradients take
            impl="torch", also where "auto" would choose the kernel.

    >>> from polyscale.trees import SignalTree
    >>> tree = SignalTree.from_parents([-1, 0, 0, 1, 1])
    >>> x = torch.randn(1, 2, 3, 8)
    >>> hsa_attention(x, x, x, tree).shape
    torch.Size([1, 2, 3, 8])
    """
    request = check_request(
        query,
        key,
        value,
        tree,
        tie=tie,
        causal=causal,
        include_self=include_self,
        key_padding_mask=key_padding_mask,
        position_scores=position_scores,
        scale=scale,
        alpha=alpha,
        enable_gqa=enable_gqa,
        impl=impl,
    )
    if has_only_a_shape(query):
        # The tree cannot tell, or need not.
        output, lse = request.value.new_zeros(_output_shape(request)), None
        if return_lse:
            lse = _in_the_graph(_empty_lse(request), request)
        output = _in_the_graph(output, request)
    else:
        output, lse = HSA_ATTENTION.choose(request.impl, request).run(request, return_lse)
    output = output.to(request.dtype)
    if packed := request.packed:
        output = output.squeeze(0)
    if not return_lse:
        return output
    assert lse is not None
    return output, lse.squeeze(0) if packed else lse


def hsa_matrix(
    query: Tensor,
    key: Tensor,
    tree: SignalTree,
    *,
    impl: str = "auto",
    **options: Unpack[HSAOptions],
) -> Tensor:
    """Return the attention matrix `[..., N, N]` that `hsa_attention` applies: for looking at.

    Takes the options of `hsa_attention`. Rows sum to one, or are zero for rows that
    have nothing to attend to; different trees of a forest do not see each other. Sixteen-bit
    inputs give a float32 matrix.

    >>> from polyscale.trees import SignalTree
    >>> tree = SignalTree.from_parents([-1, 0, 0, 1, 1])
    >>> hsa_matrix(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), tree)[0, 0].tolist()
    [0.3333333432674408, 0.3333333432674408, 0.3333333432674408]
    """
    rows = query.shape[-2] if isinstance(query, Tensor) and query.dim() >= 2 else 0
    # Attending to the rows of the identity matrix gives the weights.
    if isinstance(query, Tensor) and query.is_floating_point():
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        query = query.to(wide)
        key = key.to(wide) if isinstance(key, Tensor) and key.is_floating_point() else key
        identity = torch.eye(rows, dtype=wide, device=query.device)
        identity = identity.expand(*query.shape[:-2], rows, rows)
    else:
        identity = query
    return hsa_attention(query, key, identity, tree, impl=impl, **options)


def _output_shape(request: Request) -> tuple[int, ...]:
    return *request.query.shape[:-1], request.value.shape[-1]


def _empty_lse(request: Request) -> Tensor:
    batch, heads, rows, _ = request.query.shape
    last = rows if request.tie == "columns" else request.tree.num_trees
    dtype = torch.float64 if request.dtype == torch.float64 else torch.float32
    return request.query.new_zeros(batch, heads, last, dtype=dtype)


def context_of(request: Request) -> AttentionContext:
    """Return the fast path's view of a request."""
    tree = request.tree
    batch, heads = request.query.shape[:2]
    sizes = [high - low for low, high in pairwise(tree.depth_offsets)]
    positions = [
        None if part is None else part.split(sizes, dim=1)
        for part in (request.position_query, request.position_key)
    ]
    return AttentionContext(
        tree=tree,
        plan=plans_of(tree).plan(tree, batch * heads, request.tie == "columns"),
        batch=batch,
        heads=heads,
        scale=request.scale,
        causal=request.causal,
        include_self=request.include_self,
        counts=None if request.ignored is None else _counts_left(tree, request.ignored),
        position_query=positions[0],
        position_key=positions[1],
        alpha=request.alpha,
    )


def flat_rows(tensor: Tensor, ignored: Tensor | None) -> Tensor:
    """Return [B, H, N, D] as rows [B * H * N, D], ignored ones zero whatever they held."""
    if ignored is not None:
        tensor = tensor.masked_fill(ignored[:, None, :, None], 0.0)
    return tensor.reshape(-1, tensor.shape[-1])


def _differentiable(request: Request) -> list[Tensor]:
    """Return what gradients are asked of."""
    if not torch.is_grad_enabled():
        return []
    parts = (
        request.query,
        request.key,
        request.value,
        request.position_query,
        request.position_key,
        request.alpha,
    )
    return [part for part in parts if part is not None and part.requires_grad]


def _in_the_graph(output: Tensor, request: Request) -> Tensor:
    """Return the output as a function of all inputs, also where nothing attends to anything."""
    for part in _differentiable(request):
        output = output + part[:0].sum()  # zero, whatever numbers the input holds
    return output


def _torch(request: Request, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    request = request.widened()
    output = _in_parts(request)
    if not (request.tree.max_depth and output.requires_grad):
        output = _in_the_graph(output, request)
    return output, _torch_lse(request) if return_lse else None


def _torch_lse(request: Request) -> Tensor:
    context = context_of(request)
    rows = [flat_rows(part, request.ignored) for part in (request.query, request.key)]
    batch, heads = request.query.shape[:2]
    if request.tie == "columns":
        found = columns_energy(context, *rows)[1]
    else:
        found = blocks_energy(context, *rows)[0][:, : request.tree.num_trees]
    return -found.view(batch, heads, -1)


def _in_parts(request: Request) -> Tensor:
    if _differentiable(request):
        return _attend(request)
    # Without a backward pass nothing has to be kept, so a few copies of the tree's rows at a time
    # work in memory that is still in the cache.
    batch, heads, rows, width = request.query.shape
    copies = max(1, CHUNK_BYTES // (rows * width * request.query.element_size()))
    if copies >= batch * heads:
        return _attend(request)
    batch_step, head_step = max(1, copies // heads), min(copies, heads)
    output = torch.empty_like(request.value, memory_format=torch.contiguous_format)
    for first in range(0, batch, batch_step):
        for head in range(0, heads, head_step):
            at = slice(first, first + batch_step), slice(head, head + head_step)
            output[at] = _attend(_part(request, *at))
    return output


def _native(request: Request, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    tree = request.tree
    compiling = torch.compiler.is_compiling()
    plan = plan_in_graph(tree_tensors(tree)) if compiling else plan_of(tree)
    left, right = request.position_query, request.position_key
    left, right = (None if part is None else part.to(torch.float32) for part in (left, right))
    query, key, value, ignored = request.query, request.key, request.value, request.ignored
    columns = request.tie == "columns"
    output, log_sums = op.attend(
        query,
        key,
        value,
        plan,
        ignored,
        left,
        right,
        columns,
        request.causal,
        request.include_self,
        request.scale,
    )
    if not return_lse:
        return output, None
    return output, log_sums if columns else log_sums[..., : tree.num_trees]


def _why_unsupported(request: Request) -> str | None:
    return op.why_unsupported(request.query, request.key, request.value, request.alpha)


def _part(request: Request, batch: slice, heads: slice) -> Request:
    """Return the request of some batch entries and heads."""
    positions = [
        part[heads] if part is not None and part.shape[0] > 1 else part
        for part in (request.position_query, request.position_key)
    ]
    return replace(
        request,
        query=request.query[batch, heads],
        key=request.key[batch, heads],
        value=request.value[batch, heads],
        ignored=None if request.ignored is None else request.ignored[batch],
        position_query=positions[0],
        position_key=positions[1],
    )


def _attend(request: Request) -> Tensor:
    attend = blocks_attention if request.tie == "blocks" else columns_attention
    output = attend(
        context_of(request),
        flat_rows(request.query, request.ignored),
        flat_rows(request.key, request.ignored),
        flat_rows(request.value, request.ignored),
    )
    output = output.view(*request.query.shape[:-1], request.value.shape[-1])
    if request.ignored is not None:
        output = output.masked_fill(request.ignored[:, None, :, None], 0.0)
    return output


def _counts_left(tree: SignalTree, ignored: Tensor) -> Tensor:
    """Return how many leaves the mask leaves under each node: [B, M]."""
    left = (~ignored[:, tree.leaf_row[tree.leaf_order]]).long()  # [B, leaves], left to right
    before = torch.nn.functional.pad(left.cumsum(-1), (1, 0))  # [B, leaves + 1]
    return before[:, tree.leaf_begin + tree.leaf_count] - before[:, tree.leaf_begin]


def reference_settings(request: Request) -> reference.Settings:
    """Return the reference's view of a request."""
    return reference.Settings(
        scale=request.scale,
        tie=request.tie,
        causal=request.causal,
        include_self=request.include_self,
        position_query=request.position_query,
        position_key=request.position_key,
        alpha=request.alpha,
    )


def _dense(request: Request, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    request = request.widened()
    roots = reference.from_tree(request.tree)
    settings = reference_settings(request)
    outputs, sums = [], []
    for at in range(request.query.shape[0]):
        query, key, value = request.query[at], request.key[at], request.value[at]
        trees: list[reference.Node | None] = list(roots)
        if request.ignored is not None:
            ignored = request.ignored[at]
            trees = [reference.prune(root, ignored.tolist()) for root in roots]
            query, key, value = (
                part.masked_fill(ignored[:, None], 0.0) for part in (query, key, value)
            )
        output = torch.zeros_like(value)
        lse = list(_empty_lse(request)[at].sub(torch.inf).unbind(-1))
        for number, root in enumerate(trees):
            if root is None:
                continue
            result = reference.attention_matrix(query, key, root, settings)
            output = output + result.matrix @ value
            if request.tie == "blocks":
                lse[number] = -result.phi[root.number]
            for row, energy in result.row_energy.items():
                lse[row] = -energy
        outputs.append(output)
        sums.append(torch.stack(lse, -1))
    output = _in_the_graph(torch.stack(outputs), request)
    return output, _in_the_graph(torch.stack(sums), request) if return_lse else None


def _preferred(request: Request) -> tuple[str, ...]:
    # A FLOP counter sees torch's own products only.
    return ("torch",) if counts_flops() else ("native", "torch")


HSA_ATTENTION = Operation(
    "hsa_attention",
    (
        Backend("reference", _dense, "dense recursion, slow"),
        Backend("torch", _torch, "all families of a depth at once"),
        native_backend(
            LIBRARY,
            _native,
            "any tree, one pass up and one down, CPU, float32 and bfloat16",
            _why_unsupported,
        ),
    ),
    preferred=_preferred,
)
OPERATIONS = (HSA_ATTENTION, HSA_STEP)
