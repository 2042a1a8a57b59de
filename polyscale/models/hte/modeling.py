"""The hierarchical transformer encoder as Hugging Face models."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    initialization,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import ModelOutput, can_return_tuple

from polyscale.layers.hsa import HSAAttention, HTELayer
from polyscale.layers.hsa_pooling import global_mean, pool_into_parents, tree_mean
from polyscale.layers.hsa_positions import DomainPositions
from polyscale.models.base import PolyscaleModel
from polyscale.models.hte.configuration import HTEConfig
from polyscale.models.hte.documents import DocumentModel
from polyscale.models.hte.embedding import LeafEncoder, LeafPlaces, WordVectors, leaf_embedding
from polyscale.models.hte.inputs import Inputs, read_inputs
from polyscale.trees import SignalTree
from polyscale.trees.reshaping import nodes_left


@dataclass
class HTEModelOutput(ModelOutput):
    """What `HTEModel` returns."""

    last_hidden_state: Tensor | None = None  # [N', C], packed
    tree: SignalTree | None = None  # over those rows: smaller than the input's if pooled
    hidden_states: tuple[Tensor, ...] | None = None


class HTEBlock(GradientCheckpointingLayer, HTELayer):
    """An HTE layer with gradient checkpointing."""


class HTEPreTrainedModel(PolyscaleModel):
    """Loading, saving and initial weights, common to the HTE models."""

    config_class = HTEConfig
    # Trainer counts the elements of the main input, which is a dict here: it must not find it.
    main_input_name = "leaves"
    _no_split_modules = ("HTEBlock",)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model; frozen encoders and word vectors stay frozen."""
        loaded = super().from_pretrained(*args, **kwargs)
        for module in (loaded[0] if isinstance(loaded, tuple) else loaded).modules():
            if isinstance(module, (LeafEncoder, WordVectors)):
                module.set_requires_grad()
        return loaded

    def _init_own_weights(self, module: nn.Module) -> None:
        if isinstance(module, HSAAttention) and module.alpha_logits is not None:
            initialization.zeros_(module.alpha_logits)
        elif isinstance(module, DomainPositions):
            initialization.copy_(module.frequencies, module.initial_frequencies())
            # About the norm of the positions in sequences and grids.
            initialization.normal_(module.keys.weight, std=module.width**-0.5)


class HTEModel(HTEPreTrainedModel):
    """Embeddings of every modality and HTE layers: hidden states of the leaves, packed."""

    def __init__(self, config: HTEConfig) -> None:
        super().__init__(config)
        # A list in the order of config.modality_names: names need not be valid module names.
        self.embeddings = nn.ModuleList()
        for name in config.modality_names:
            self.embeddings.append(leaf_embedding(config.modalities[name], config))
        self.encoder = None if config.encoder is None else LeafEncoder(config)
        self.positions: DomainPositions | None = None
        if config.position_width and (config.attention != "none" or config.leaf_positions):
            self.positions = DomainPositions(
                config.position_width, config.key_names, config.position_seed
            )
        self.places: LeafPlaces | None = None
        if config.leaf_positions:
            self.places = LeafPlaces(config.position_width, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            HTEBlock(config.hidden_size, config.num_attention_heads, **config.layer_options())
            for _ in range(config.num_hidden_layers)
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        inputs: Inputs,
        tree: SignalTree,
        graph_positions: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> HTEModelOutput:
        """Hidden states of the leaves.

        Args:
            inputs: for each modality of the tree the ids `[n]` or vectors `[n, width]` of its
                leaves, in the order of their rows; a tensor alone if there is one modality. For an
                encoder, token ids `[n, L]` padded with -1, or the vectors `encode_leaves` made.
            tree: over N packed rows, those of all trees of a batch one after the other.
            graph_positions: `[M, position_width]` for trees with graph domains.
            output_hidden_states: whether to return the input of every layer and the last output.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self._embed(inputs, tree)  # [N, C]
        tree = tree.to(x.device)
        if graph_positions is not None:
            if graph_positions.dim() != 2 or len(graph_positions) != tree.num_nodes:
                raise ValueError(
                    f"graph_positions must have shape [{tree.num_nodes}, position_width], a row "
                    f"for each node, got {list(graph_positions.shape)}"
                )
            graph_positions = graph_positions.to(x.device)
        seen, positions = self._attended_tree(tree, graph_positions)
        if self.places is not None and positions is not None:
            x = x + self.places(positions, seen)
        if self.config.attention == "none":
            positions = None  # of no use to the layers
        x = self.dropout(x)
        hidden_states = []
        for number, layer in enumerate(self.layers):
            hidden_states.append(x)
            x = layer(x, seen, None, positions)
            if self.config.local_pooling and number + 1 < len(self.layers):
                if graph_positions is not None:
                    graph_positions = graph_positions[nodes_left(tree)]
                x, tree = pool_into_parents(x, tree)
                seen, positions = self._attended_tree(tree, graph_positions)
                positions = None if self.config.attention == "none" else positions
        hidden_states.append(x)
        return HTEModelOutput(
            last_hidden_state=x,
            tree=tree,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )

    def _attended_tree(
        self, tree: SignalTree, graph_positions: Tensor | None
    ) -> tuple[SignalTree, Tensor | None]:
        """The tree that the attention uses, and the positions of its nodes."""
        if self.config.attention == "flat":
            # The flat tree has the same rows and no graph domains.
            tree, graph_positions = tree.flatten(), None
        return tree, None if self.positions is None else self.positions(tree, graph_positions)

    def _embed(self, inputs: Inputs, tree: SignalTree) -> Tensor:
        found = read_inputs(inputs, tree)
        names = self.config.modality_names
        unknown = [name for name in tree.modality_names if name not in names]
        if unknown:
            raise ValueError(
                f"tree must have modalities out of {list(names)}, got {unknown}; rename them with "
                "tree.with_modality"
            )
        x = torch.zeros(tree.num_rows, self.config.hidden_size, dtype=self.dtype)
        x = x.to(self.device)
        for name, (rows, values) in found.items():
            embed = self.embeddings[names.index(name)]
            values = self._encoded(name, values)
            self._check(name, values, embed)
            if isinstance(embed, nn.Linear):
                values = values.to(embed.weight.dtype)
            x = x.index_copy(0, rows.to(x.device), embed(values).to(x.dtype))
        return x

    def _encoded(self, name: str, values: Tensor) -> Tensor:
        """Vectors of what an encoder reads, rows of token ids; anything else as it is."""
        is_text = name == self.config.encoder_modality and values.dim() == 2
        if self.encoder is None or not is_text or values.is_floating_point():
            return values
        return self.encoder(values.to(self.device))

    def _check(self, name: str, values: Tensor, embed: nn.Module) -> None:
        got = f"got {values.dtype} {list(values.shape)}"
        if isinstance(embed, nn.Linear):
            if values.dim() != 2 or values.shape[1] != embed.in_features:
                raise ValueError(
                    f"inputs[{name!r}] must be vectors [n, {embed.in_features}], {got}"
                )
            return
        assert isinstance(embed, (nn.Embedding, WordVectors))
        if values.dim() != 1 or values.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"inputs[{name!r}] must be token ids [n], int64 or int32, {got}")
        # On a CPU only: elsewhere it would synchronise, and the embedding itself refuses.
        if values.device.type == "cpu" and values.numel():
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= embed.num_embeddings:
                raise ValueError(
                    f"inputs[{name!r}] must be ids from 0 to {embed.num_embeddings - 1}, got {low} "
                    f"to {high}"
                )


class HTEForClassification(DocumentModel, HTEPreTrainedModel):
    """A class (or several, or a number) for each tree.

    Example:
        >>> tree = SignalTree.batch([SignalTree.from_windows(6, (3,)), SignalTree.from_windows(4)])
        >>> model = HTEForClassification(HTEConfig(num_labels=3))
        >>> model(torch.randint(0, 259, (10,)), tree).logits.shape
        torch.Size([2, 3])
    """

    def __init__(self, config: HTEConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"  # by config.problem_type
        self.model = HTEModel(config)
        hidden = config.classifier_size or config.hidden_size
        self.classifier = nn.Sequential(
            nn.Linear(config.hidden_size, hidden),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(hidden, config.num_labels),
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        inputs: Inputs,
        tree: SignalTree,
        labels: Tensor | None = None,
        graph_positions: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits `[num_trees, num_labels]`; see `HTEModel.forward` for the arguments."""
        unknown = set(kwargs) - {"num_items_in_batch"}
        if unknown:
            raise TypeError(
                f"forward must not get arguments unknown to HTE models, got {sorted(unknown)}"
            )
        output = self.model(inputs, tree, graph_positions, output_hidden_states, return_dict=True)
        pool = tree_mean if self.config.pooling == "tree" else global_mean
        logits = self.classifier(pool(output.last_hidden_state, output.tree))
        loss = None
        if labels is not None:
            if labels.shape[:1] != logits.shape[:1]:
                raise ValueError(
                    f"labels must have one entry for each of the {len(logits)} trees, got shape "
                    f"{list(labels.shape)}"
                )
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, **kwargs
            )
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states
        )


AutoConfig.register("hte", HTEConfig)
AutoModel.register(HTEConfig, HTEModel)
AutoModelForSequenceClassification.register(HTEConfig, HTEForClassification)
