"""The kernel's view of a tree: one array of int32, made once for equal trees.

See plan.h for what is in it. A tree's plan goes with the tree; equal trees share one as long as
one of them lives.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyscale.ops.hsa.native.library import plan_size

if TYPE_CHECKING:
    from polyscale.trees import SignalTree

IN_ORDER = 10  # where a plan says whether leaves from left to right carry rising rows

_by_tree: dict[int, Tensor] = {}
_by_content: weakref.WeakValueDictionary[bytes, Tensor] = weakref.WeakValueDictionary()


def plan_of(tree: SignalTree) -> Tensor:
    """The plan of a tree, made on first use, shared by equal trees and dropped with the last."""
    known = _by_tree.get(id(tree))
    if known is not None:
        return known
    content = _content(tree)
    plan = _by_content.get(content)
    if plan is None:
        plan = _by_content[content] = _make(tree)
    _by_tree[id(tree)] = plan
    weakref.finalize(tree, _by_tree.pop, id(tree), None).atexit = False
    return plan


# What is made on a first call under inference mode has to serve training later.
@torch.inference_mode(False)
def _make(tree: SignalTree) -> Tensor:
    tensors = tree_tensors(tree)
    # Enough for most trees; the first try says what the others take.
    plan = torch.empty(1024 + 12 * tree.num_nodes + 2 * tree.num_rows, dtype=torch.int32)
    size = plan_size(tensors, plan)
    if size > plan.numel():
        plan = torch.empty(size, dtype=torch.int32)
        plan_size(tensors, plan)
    return plan[:size].clone()


def tree_tensors(tree: SignalTree) -> list[Tensor]:
    """What a plan is made of."""
    return [
        tree.parent,
        tree.first_child,
        tree.child_count,
        tree.leaf_count,
        tree.leaf_begin,
        tree.leaf_row,
        tree.leaf_order,
        tree.row_node,
    ]


def _content(tree: SignalTree) -> bytes:
    """What tells unequal trees apart, as far as attention sees them."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{tree.num_nodes} {tree.num_trees} ".encode())
    for tensor in (tree.child_count, tree.leaf_row, tree.row_node):
        tensor = tensor.detach().contiguous()
        digest.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))  # torch may lack NumPy
    return digest.digest()


def plan_room(nodes: int, rows: int) -> int:
    """As many entries as the plan of any tree of this size takes: a compiler needs the number."""
    return 64 + 48 * nodes + rows


@torch.library.custom_op("polyscale::hsa_plan", mutates_args=(), device_types="cpu")
def plan_in_graph(tensors: list[Tensor]) -> Tensor:
    """The plan of a tree that is an input of a compiled graph."""
    room = plan_room(tensors[0].numel(), tensors[-1].numel())
    plan = torch.empty(room, dtype=torch.int32)
    plan_size(tensors, plan)
    return plan


@plan_in_graph.register_fake
def _(tensors: list[Tensor]) -> Tensor:
    room = plan_room(tensors[0].numel(), tensors[-1].numel())
    return tensors[0].new_empty(room, dtype=torch.int32)
