"""Position embeddings of a tree's nodes: each child's, as its parent's domain gives it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyscale.checks import check_integer
from polyscale.trees import SignalTree


class DomainPositions(nn.Module):
    """One embedding per node, `[M, width]`; siblings are compared by their dot product.

    `sequence` and `grid2d` children get random Fourier features of their coordinates, whose dot
    product depends only on the distance; members of a `set` get zeros; members of a `keyed` family
    get the learned embedding of their name; members of a `graph` get what the caller passes,
    usually Laplacian eigenvectors.

    Args:
        width: of the embeddings, even.
        key_names: names that keyed families may use.
        seed: of the random frequencies.

    Example:
        >>> tree = SignalTree.from_nested({"title": [1, 2], "body": [3, 4, 5]})
        >>> DomainPositions(8, key_names=("title", "body"))(tree).shape
        torch.Size([8, 8])
    """

    def __init__(self, width: int, key_names: Sequence[str] = (), seed: int = 0) -> None:
        super().__init__()
        width = check_integer("width", width, least=2)
        if width % 2:
            raise ValueError(f"width must be even, got {width}")
        self.width, self.key_names, self.seed = width, tuple(key_names), seed
        self.keys = nn.Embedding(max(1, len(self.key_names)), width)
        self.frequencies: Tensor  # [2, width / 2]
        self.register_buffer("frequencies", self.initial_frequencies())

    def initial_frequencies(self) -> Tensor:
        """Random directions, periods from about 6 to 6,000 steps."""
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        half = self.width // 2
        directions = torch.randn(2, half, generator=generator, device="cpu")
        directions = directions / directions.norm(dim=0)
        return directions * 10.0 ** -torch.linspace(0, 3, half, device="cpu")

    def forward(self, tree: SignalTree, graph_positions: Tensor | None = None) -> Tensor:
        """Embed every node; roots get zeros."""
        parents_domain = torch.where(tree.parent >= 0, tree.domain[tree.parent.clamp(min=0)], -1)
        codes = {name: code for code, name in enumerate(tree.DOMAINS)}

        def of(domain: str) -> Tensor:
            return (parents_domain == codes[domain])[:, None]  # [M, 1]

        angle = tree.position.to(self.frequencies.dtype) @ self.frequencies  # [M, width / 2]
        along = tree.position[:, :1].to(angle.dtype) * self.frequencies.norm(dim=0)
        angle = torch.where(of("sequence"), along, angle)
        waves = torch.cat((angle.cos(), angle.sin()), dim=-1) * (2 / self.width) ** 0.5
        embedded = waves * (of("sequence") | of("grid2d"))
        if bool((parents_domain == codes["keyed"]).any()):
            named = self.keys(self._key_index(tree).clamp(min=0))
            embedded = torch.where(of("keyed"), named, embedded)
        if bool((parents_domain == codes["graph"]).any()):
            if graph_positions is None or graph_positions.shape != embedded.shape:
                got = None if graph_positions is None else list(graph_positions.shape)
                raise ValueError(
                    "graph_positions must be given for a tree with graph domains, shape "
                    f"[M, width] = {list(embedded.shape)}, got {got}"
                )
            embedded = torch.where(of("graph"), graph_positions.to(embedded.dtype), embedded)
        return embedded

    def _key_index(self, tree: SignalTree) -> Tensor:
        """The tree's key numbers as indices into `key_names`."""
        unknown = [name for name in tree.key_names if name not in self.key_names]
        if unknown:
            raise ValueError(
                f"key_names must hold the tree's keys: {unknown} not in {list(self.key_names)}"
            )
        table = [self.key_names.index(name) for name in tree.key_names]
        return torch.tensor([*table, -1], device=tree.device)[tree.key]


def laplacian_positions(adjacency: Tensor, width: int) -> Tensor:
    """Eigenvectors of the normalised Laplacian with the smallest eigenvalues, `[n, width]`.

    They are positions for the members of one graph family; zeros follow where the graph is small.

    >>> laplacian_positions(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 4).shape
    torch.Size([2, 4])
    """
    if adjacency.dim() != 2 or adjacency.shape[0] != adjacency.shape[1]:
        raise ValueError(f"adjacency must be square, got shape {list(adjacency.shape)}")
    degree = adjacency.sum(-1).clamp(min=1e-12).rsqrt()
    laplacian = torch.eye(len(adjacency)).to(adjacency) - degree[:, None] * adjacency * degree
    vectors = torch.linalg.eigh((laplacian + laplacian.T) / 2).eigenvectors[:, 1 : width + 1]
    return nn.functional.pad(vectors, (0, width - vectors.shape[1]))
