"""What HTEForClassification does with documents: predict, encode, explain."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from polyscale._import_hook import once_imported
from polyscale.checks import check_choice, check_integer
from polyscale.documents import Document
from polyscale.documents.building import TEXT
from polyscale.models.hte import pipeline
from polyscale.models.hte.collation import collate_trees
from polyscale.models.hte.embedding import load_encoder, word_table
from polyscale.models.hte.explanation import Explanation, explain
from polyscale.models.hte.inputs import rows_by_modality
from polyscale.models.hte.processing import HTEProcessor
from polyscale.trees import SignalTree

once_imported("transformers.pipelines", pipeline.register)

LEVELS = ("document", "section", "paragraph", "sentence", "node")


@dataclass(frozen=True, eq=False)
class NodeVectors:
    """Vectors of nodes of a document."""

    document: Document
    nodes: list[int]
    vectors: Tensor  # [nodes, C]

    @property
    def texts(self) -> list[str]:
        """The source of each node."""
        return [self.document.text(node) for node in self.nodes]


class DocumentModel(PreTrainedModel):
    """A model that may have a processor, saved and loaded with it."""

    processor: HTEProcessor | None = None

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the model and, as `model.processor`, the processor saved with it, if any."""
        model = super().from_pretrained(name, *args, **kwargs)
        if name is None:
            return model
        where = {
            key: kwargs[key]
            for key in ("cache_dir", "revision", "token", "local_files_only", "subfolder")
            if kwargs.get(key) is not None
        }
        found = cached_file(
            name,
            "processor_config.json",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **where,
        )
        if found is not None:
            loaded = model[0] if isinstance(model, tuple) else model
            loaded.processor = HTEProcessor.from_pretrained(name, **where)
        return model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model and its processor."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if self.processor is not None and kwargs.get("is_main_process", True):
            self.processor.save_pretrained(os.fspath(save_directory))

    @classmethod
    def from_processor(
        cls, processor: HTEProcessor, *, encoder: Any = None, vectors: Any = None, **options: Any
    ) -> Any:
        """Return a new model for what a processor makes, with pretrained leaves if given.

        Args:
            processor: becomes `model.processor`.
            encoder: for sentences as leaves: a Hugging Face encoder, its folder or its name.
            vectors: for words as leaves: a mapping of words to vectors of one width, such as
                gensim's KeyedVectors. Words without one get zeros.
            options: of `HTEConfig`; `freeze=False` trains encoder or vectors, too.

        Example:
            >>> processor = HTEProcessor.from_documents(["A fish.", "A bird."], ["f", "b"])
            >>> vectors = {"fish": [1.0, 0.0], "bird": [0.0, 1.0]}
            >>> from polyscale import HTEForClassification
            >>> model = HTEForClassification.from_processor(processor, vectors=vectors)
            >>> model.config.modalities
            {'text': {'vocab_size': 5, 'width': 2}}
        """
        loaded = None if encoder is None else load_encoder(encoder)
        if loaded is not None:
            options["encoder"] = loaded.config.to_dict()
        table = None if vectors is None else word_table(vectors, processor.tokenizer)
        if table is not None:
            options["vector_width"] = table.shape[1]
        model = cls(processor.config(**options))
        model.processor = processor
        if loaded is not None:
            tokenizer, most = (
                processor.tokenizer,
                getattr(
                    loaded.config, "max_position_embeddings", processor.tokenizer.model_max_length
                ),
            )
            tokenizer.model_max_length = min(tokenizer.model_max_length, most)
            model.model.encoder.encoder.load_state_dict(loaded.state_dict())
        if table is not None:
            place = model.config.modality_names.index(TEXT)
            with torch.no_grad():
                model.model.embeddings[place].table.weight.copy_(table)
        return model

    @torch.no_grad()
    def encode_leaves(self, examples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return examples of the processor with the encoder's vectors for its inputs.

        With a frozen encoder, training on them gives the same model as training on the examples,
        and encodes once. One that is not frozen is used without dropout, and is not trained so.
        """
        leaves = self.model.encoder
        if leaves is None:
            raise ValueError(
                "encoder must be that of the leaves, got None; make the model with "
                "from_processor(processor, encoder=...)"
            )
        was_training = leaves.training
        leaves.eval()
        name, found = self.config.encoder_modality, []
        for example in examples:
            inputs = dict(example["inputs"])
            if name in inputs:
                inputs[name] = leaves(inputs[name].to(self.device)).cpu()
            found.append({**example, "inputs": inputs})
        leaves.train(was_training)
        return found

    def document_processor(self) -> HTEProcessor:
        """Return the processor; an error says how to get one."""
        if self.processor is None:
            raise ValueError(
                "processor must be set to read documents, got None; set model.processor = "
                "HTEProcessor.from_documents(...) and save_pretrained keeps it"
            )
        return self.processor

    @torch.no_grad()
    def predict(self, documents: Any, *, batch_size: int = 8) -> list[dict[str, Any]]:
        """Return the answer for each document.

        One class: {"label", "score", "scores"}; several: {"labels", "scores"}, those above one
        half; a number: {"value"}.
        """
        processor = self.document_processor()
        if isinstance(documents, (str, os.PathLike, dict)):
            return self.predict([documents], batch_size=batch_size)
        check_integer("batch_size", batch_size, least=1)
        documents, answers = list(documents), []
        with _evaluating(self):
            for begin in range(0, len(documents), batch_size):
                batch = processor(documents[begin : begin + batch_size])
                answers += [self.answer(row) for row in self(**batch).logits.float().cpu()]
        return answers

    def answer(self, logits: Tensor) -> dict[str, Any]:
        """Return what `predict` returns for a document's logits."""
        kind = self.config.problem_type
        if kind == "regression" or (kind is None and len(logits) == 1):
            values = logits.tolist()
            return {"value": values[0] if len(values) == 1 else values}
        names = [self.config.id2label[number] for number in range(len(logits))]
        if kind == "multi_label_classification":
            scores = dict(zip(names, logits.sigmoid().tolist(), strict=True))
            return {"labels": [n for n, score in scores.items() if score > 0.5], "scores": scores}
        scores = dict(zip(names, logits.softmax(0).tolist(), strict=True))
        label = max(scores, key=scores.__getitem__)
        return {"label": label, "score": scores[label], "scores": scores}

    @torch.no_grad()
    def encode(
        self,
        documents: Any,
        level: str = "document",
        *,
        batch_size: int = 8,
        of: str = "hidden_states",
    ) -> Tensor | list[NodeVectors]:
        """Return a vector for each document [documents, C], or for each node of a level.

        One pass gives all of them: the vector of a node is the mean of its leaves' hidden states.

        Args:
            documents: a list of documents or records, or one.
            level: "document", "section", "paragraph", "sentence", or "node" for all.
            batch_size: documents in a pass.
            of: "hidden_states", which training has shaped, or "encoder": what the pretrained
                encoder made of each sentence, which needs no training. Compare those by cosine:
                leaves that are no text count as zeros.
        """
        check_choice("level", level, LEVELS)
        check_choice("of", of, ("hidden_states", "encoder"))
        check_integer("batch_size", batch_size, least=1)
        if self.config.local_pooling:
            raise ValueError("encode needs local_pooling=False: pooled leaves have no vectors")
        processor = self.document_processor()
        single = isinstance(documents, (str, os.PathLike, dict))
        read = [processor.read(one) for one in ([documents] if single else documents)]
        found = []
        with _evaluating(self):
            for begin in range(0, len(read), batch_size):
                part = read[begin : begin + batch_size]
                batch = collate_trees([processor.example_of(one) for one in part])
                rows = self._encoder_rows(batch) if of == "encoder" else None
                if rows is None:
                    rows = self.model(**batch).last_hidden_state
                found += _of_documents(rows, batch["tree"], part, level)
        if level == "document":
            width = self.config.hidden_size
            return torch.cat([one.vectors for one in found]) if found else torch.zeros(0, width)
        return found

    def _encoder_rows(self, batch: dict[str, Any]) -> Tensor:
        """The encoder's vector of each row, zeros where the leaf is no text: [N, C]."""
        (encoded,) = self.encode_leaves([batch])
        name = self.config.encoder_modality
        vectors, rows = encoded["inputs"].get(name), rows_by_modality(batch["tree"]).get(name)
        found = torch.zeros(batch["tree"].num_rows, self.config.modalities[name]["width"])
        return found if rows is None else found.index_copy(0, rows, vectors.float())

    def explain(
        self, document: Any, label: str | int | None = None, *, kinds: Any = None
    ) -> Explanation:
        """Return what every node adds to the answer, by leaving it out and by gradients.

        Args:
            document: a document or record, as `predict` takes.
            label: whose logit is explained; the predicted one if None.
            kinds: only nodes of these kinds, such as ("section", "sentence"); all if None.
        """
        with _evaluating(self):
            return explain(self, self.document_processor(), document, label, kinds)


class _evaluating:  # noqa: N801, a context manager
    """Dropout off, and on again if it was."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.training = model, model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.training)


def node_means(rows: Tensor, tree: SignalTree) -> Tensor:
    """Return the mean of the rows under each node: [M, C]."""
    tree = tree.to(rows.device)
    in_order = rows[tree.leaf_row[tree.leaf_order]].double()
    before = torch.cat([in_order.new_zeros(1, rows.shape[1]), in_order.cumsum(0)])
    total = before[tree.leaf_begin + tree.leaf_count] - before[tree.leaf_begin]
    return (total / tree.leaf_count[:, None]).to(rows.dtype)


def _of_documents(
    hidden: Tensor, forest: SignalTree, documents: list[Document], level: str
) -> list[NodeVectors]:
    means = node_means(hidden, forest).cpu()
    # The nodes of a forest are those of its trees, sorted by depth.
    order = torch.argsort(torch.cat([one.tree.depth for one in documents]), stable=True)
    by_document = torch.empty_like(means)
    by_document[order] = means
    found, begin = [], 0
    for one in documents:
        nodes = list(range(one.tree.num_nodes)) if level == "node" else one.nodes(level)
        vectors = by_document[begin : begin + one.tree.num_nodes][torch.tensor(nodes).long()]
        found.append(NodeVectors(one, nodes, vectors))
        begin += one.tree.num_nodes
    return found
