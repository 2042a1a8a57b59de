"""`transformers.pipeline("document-classification", model=...)`."""

from types import ModuleType
from typing import Any

from transformers import AutoModelForSequenceClassification

TASK = "document-classification"


def register(pipelines: ModuleType) -> None:
    """Make the task known to `transformers.pipeline`; called once that is imported."""

    class DocumentClassificationPipeline(pipelines.Pipeline):  # type: ignore[name-defined]
        """Documents or records in, what `HTEForClassification.predict` returns out.

        The model's own processor reads them; `tokenizer` and the like are not used.
        """

        _load_processor = False
        _load_image_processor = False
        _load_video_processor = False
        _load_feature_extractor = False
        _load_tokenizer = False

        def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], ...]:
            if options:
                raise TypeError(f"pipeline must get no options, got {sorted(options)}")
            return {}, {}, {}

        def preprocess(self, document: Any) -> dict[str, Any]:
            return self.model.document_processor()([document])

        def _forward(self, batch: dict[str, Any]) -> Any:
            return self.model(**{**batch, "tree": batch["tree"].to(self.device)})

        def postprocess(self, output: Any) -> dict[str, Any]:
            return self.model.answer(output.logits[0].float().cpu())

    pipelines.PIPELINE_REGISTRY.register_pipeline(
        TASK,
        pipeline_class=DocumentClassificationPipeline,
        pt_model=AutoModelForSequenceClassification,
        type="text",
    )
