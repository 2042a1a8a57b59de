"""What leaves are made of: tables of ids, word vectors, and encoders of their texts."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from polyscale.models.hte.configuration import HTEConfig
from polyscale.trees import SignalTree

PADDING = -1  # of rows of token ids
TOKENS_AT_ONCE = 8192


class WordVectors(nn.Module):
    """A table of vectors and a linear map of them."""

    def __init__(self, count: int, width: int, hidden_size: int, *, freeze: bool) -> None:
        super().__init__()
        self.num_embeddings = count
        self.table = nn.Embedding(count, width)
        self.frozen = freeze
        self.set_requires_grad()
        self.linear = nn.Linear(width, hidden_size)

    def set_requires_grad(self) -> None:
        """A frozen table gets no gradients; loading forgets it."""
        self.table.weight.requires_grad_(not self.frozen)

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors of ids [n], mapped: [n, hidden_size]."""
        return self.linear(self.table(ids))


class LeafPlaces(nn.Module):
    """The place of each leaf in its tree: a sum over its ancestors, a map for each depth.

    Depths from 12 on share one map.
    """

    DEPTHS = 12

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.maps = nn.ModuleList(
            nn.Linear(width, hidden_size, bias=False) for _ in range(self.DEPTHS)
        )

    def forward(self, positions: Tensor, tree: SignalTree) -> Tensor:
        """Places of all rows [N, C] from the positions of all nodes [M, width]."""
        parts = [positions.new_zeros(tree.num_trees, self.hidden_size)]  # the roots
        for depth, (begin, end) in enumerate(pairwise(tree.depth_offsets[1:])):
            before = parts[-1]
            above = tree.parent[begin:end] - tree.depth_offsets[depth]
            mapped = self.maps[min(depth, self.DEPTHS - 1)](positions[begin:end])
            parts.append(before[above] + mapped)
        places = torch.cat(parts)  # [M, C]
        return torch.where((tree.row_node >= 0)[:, None], places[tree.row_node.clamp(min=0)], 0)


class LeafEncoder(nn.Module):
    """An encoder of texts, one vector for each: the mean of its last hidden states.

    Vectors are scaled to entries of about one, whatever their length.
    """

    def __init__(self, config: HTEConfig) -> None:
        super().__init__()
        options = dict(config.encoder or {})
        self.encoder: PreTrainedModel = AutoModel.from_config(
            AutoConfig.for_model(options.pop("model_type"), **options)
        )
        self.frozen = config.freeze
        self.encoder.train(not self.frozen)
        self.set_requires_grad()

    def set_requires_grad(self) -> None:
        """A frozen encoder gets no gradients; loading forgets it."""
        self.encoder.requires_grad_(not self.frozen)

    def train(self, mode: bool = True) -> "LeafEncoder":
        """A frozen encoder has no dropout in training either."""
        return super().train(mode and not self.frozen)

    def forward(self, ids: Tensor) -> Tensor:
        """Encode rows of token ids [n, L], padded with -1; texts of one length together."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            lengths = (ids != PADDING).sum(1)  # [n]
            order = lengths.argsort(descending=True, stable=True)
            found, begin = [], 0
            sizes = lengths[order].tolist()
            while begin < len(sizes):
                width = max(1, sizes[begin])
                rows = order[begin : begin + max(1, TOKENS_AT_ONCE // width)]
                found.append(self._encode(ids[rows, :width]))
                begin += len(rows)
            vectors = torch.cat(found) if found else ids.new_zeros(0, self._width()).float()
            return torch.empty_like(vectors).index_copy(0, order, vectors)  # [n, C]

    def _encode(self, ids: Tensor) -> Tensor:
        mask = ids != PADDING
        output = self.encoder(input_ids=ids.clamp(min=0), attention_mask=mask.long())
        hidden = output.last_hidden_state  # [n, L, C]
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return nn.functional.normalize(mean, dim=-1) * self._width() ** 0.5

    def _width(self) -> int:
        return self.encoder.config.hidden_size


def leaf_embedding(kind: dict[str, int], config: HTEConfig) -> nn.Module:
    """What makes hidden states of the leaves of one modality."""
    if "width" not in kind:
        return nn.Embedding(kind["vocab_size"], config.hidden_size)
    if "vocab_size" not in kind:
        return nn.Linear(kind["width"], config.hidden_size)
    sizes = kind["vocab_size"], kind["width"], config.hidden_size
    return WordVectors(*sizes, freeze=config.freeze)


def word_table(vectors: Any, tokenizer: Any) -> Tensor:
    """The vectors of a tokenizer's words, [vocabulary, width]; zeros for words that have none."""
    words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    known = {n: torch.as_tensor(vectors[word]) for n, word in enumerate(words) if word in vectors}
    shapes = {tuple(vector.shape) for vector in known.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
        raise ValueError(
            "vectors must have words of the processor, all vectors of one width, got "
            f"{len(known)} of {len(words)} words, in shapes {sorted(shapes)}"
        )
    table = torch.zeros(len(words), *shape)
    for number, vector in known.items():
        table[number] = vector
    return table


def load_encoder(encoder: Any) -> PreTrainedModel:
    """An encoder from a folder or a name on the Hub; a model is taken as it is."""
    if isinstance(encoder, PreTrainedModel):
        return encoder
    return AutoModel.from_pretrained(encoder)
