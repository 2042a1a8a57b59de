"""What a tree does to attention, before any attention is computed."""

from dataclasses import asdict, dataclass

from polyscale.trees.tree import SignalTree


@dataclass(frozen=True)
class TreeDiagnostics:
    """Figures of a tree; of a batch, over all its trees together."""

    trees: int
    leaves: int
    inner_nodes: int
    depth: int  # of the deepest leaf
    mean_leaf_depth: float
    branching_mean: float  # children of an inner node; 0 if there is none
    branching_max: int
    one_child_share: float  # of the inner nodes
    dilution: float  # tokens averaged with j when i attends to it, mean over pairs; 1 = exact
    cost: int  # scores computed: the sum of squared family sizes
    flat_cost: int  # scores that flat attention computes: the sum of squared leaf counts

    @property
    def cost_share(self) -> float:
        """Cost as a share of the cost of flat attention."""
        return self.cost / self.flat_cost

    def as_dict(self) -> dict[str, int | float]:
        return {**asdict(self), "cost_share": self.cost_share}

    def __str__(self) -> str:
        lines = [
            f"leaves      {self.leaves:,} in {self.trees} tree{'s' if self.trees > 1 else ''}, "
            f"{self.inner_nodes:,} inner nodes",
            f"depth       {self.depth} at most, {self.mean_leaf_depth:.2f} for a leaf on average",
            f"branching   {self.branching_mean:.2f} on average, {self.branching_max} at most, "
            f"{self.one_child_share:.1%} with one child",
            f"dilution    {self.dilution:.2f} tokens share the weight of one",
            f"cost        {self.cost:,} scores, flat {self.flat_cost:,} ({self.cost_share:.2%})",
        ]
        return "\n".join(lines)


def diagnostics(tree: SignalTree) -> TreeDiagnostics:
    """See `SignalTree.diagnostics`."""
    is_leaf = tree.child_count == 0
    family = tree.child_count[~is_leaf]
    roots = tree.leaf_count[: tree.num_trees].double()
    # i in any sibling of C and j in C meet at C, where j shares its weight with l(C) leaves:
    # l(C) * (l(parent) - l(C)) pairs. Double, because cubes of long sequences overflow int64.
    own = tree.leaf_count[tree.num_trees :].double()
    whole = tree.leaf_count[tree.parent[tree.num_trees :]].double()
    pairs = float((roots * (roots - 1)).sum())
    shared = float((own * own * (whole - own)).sum())
    inner = tree.num_inner
    root_counts = [int(count) for count in roots.tolist()]
    return TreeDiagnostics(
        trees=tree.num_trees,
        leaves=tree.num_leaves,
        inner_nodes=inner,
        depth=tree.max_depth,
        mean_leaf_depth=float(tree.depth[is_leaf].double().mean()),
        branching_mean=float(family.double().mean()) if inner else 0.0,
        branching_max=int(family.max()) if inner else 0,
        one_child_share=float((family == 1).double().mean()) if inner else 0.0,
        dilution=shared / pairs if pairs else 1.0,
        cost=int((family * family).sum()),
        flat_cost=sum(count * count for count in root_counts),
    )
