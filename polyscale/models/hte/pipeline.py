"""`pipeline("document-classification")`: models over trees in the pipelines of transformers."""

from typing import Any

from transformers import AutoModelForSequenceClassification, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

TASK = "document-classification"


class DocumentClassificationPipeline(Pipeline):
    """Labels documents or records, read by the processor that is saved with the model.

    >>> from transformers import pipeline
    >>> classify = pipeline("document-classification", model="page-model")  # doctest: +SKIP
    >>> classify("<h1>Fish</h1><p>They swim.")  # doctest: +SKIP
    [{'label': 'animal', 'score': 0.98}]
    """

    _load_tokenizer = False
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], ...]:
        if kwargs:
            raise ValueError(f"document-classification must get no options, got {sorted(kwargs)}")
        return {}, {}, {}

    def preprocess(self, input_: Any, **kwargs: Any) -> dict[str, Any]:
        return {"document": input_}

    def _forward(self, input_tensors: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        model: Any = self.model
        return {"answer": model.predict([input_tensors["document"]])[0]}

    def postprocess(self, model_outputs: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        answer = dict(model_outputs["answer"])
        answer.pop("scores", None)
        return answer


PIPELINE_REGISTRY.register_pipeline(
    TASK,
    pipeline_class=DocumentClassificationPipeline,
    pt_model=AutoModelForSequenceClassification,
    type="multimodal",
)
