"""Images to the inputs of HKT models: their pixels, row by row, as numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    BatchFeature,
)

from polyscale._extras import require
from polyscale.checks import check_flag, check_integer
from polyscale.models.hkt.configuration import HKTConfig
from polyscale.models.hkt.heads import HKTForSequenceClassification


class PixelProcessor(BaseImageProcessor):
    """Scales images to `size` by `size` pixels and reads them row by row as `input_values`.

    Saved with a model, it makes `pipeline("image-classification")` read images as its training did.

    Args:
        size: pixels of a side.
        colour: three channels, or one of grey.
        image_mean: subtracted from pixels between 0 and 1.
        image_std: what they are then divided by.

    Example:
        >>> import PIL.Image
        >>> image = PIL.Image.new("L", (4, 4), 255)
        >>> PixelProcessor(size=2, image_mean=0.5, image_std=0.5)([image])["input_values"].shape
        torch.Size([1, 4, 1])
    """

    model_input_names = ["input_values"]  # noqa: RUF012 (a list in transformers)

    def __init__(
        self,
        size: int = 32,
        colour: bool = False,
        image_mean: float = 0.0,
        image_std: float = 1.0,
        **kwargs: Any,
    ) -> None:
        check_integer("size", size, least=1)
        check_flag("colour", colour)
        self.size, self.colour = size, colour
        self.image_mean, self.image_std = image_mean, image_std
        super().__init__(**kwargs)

    def pixels(self, image: Any) -> Tensor:
        """The bytes of an image of Pillow, [size * size, channels]."""
        pillow: Any = require("PIL.Image", "train", "PixelProcessor")
        if not isinstance(image, pillow.Image):
            raise TypeError(f"image must be an image of Pillow, got {type(image).__name__}")
        image = image.convert("RGB" if self.colour else "L")
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), pillow.Resampling.BILINEAR)
        values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return values.view(self.size**2, 3 if self.colour else 1)

    def values(self, pixels: Tensor) -> Tensor:
        """Bytes as the numbers that the model reads."""
        return (pixels.float() / 255.0 - self.image_mean) / self.image_std

    def __call__(self, images: Any, return_tensors: Any = None, **kwargs: Any) -> BatchFeature:
        """Inputs of the model for one image or several."""
        several = images if isinstance(images, Sequence) else [images]
        values = torch.stack([self.values(self.pixels(image)) for image in several])
        return BatchFeature({"input_values": values})


AutoImageProcessor.register(HKTConfig, slow_image_processor_class=PixelProcessor)
AutoModelForImageClassification.register(HKTConfig, HKTForSequenceClassification)
