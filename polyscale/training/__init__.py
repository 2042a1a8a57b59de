"""One training path, on the Hugging Face Trainer."""

from polyscale._extras import require

for _module in ("transformers", "accelerate", "rich"):
    require(_module, "train", "training")
