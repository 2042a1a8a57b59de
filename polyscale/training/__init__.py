"""One training path, on Accelerate."""

from polyscale._extras import require

for _module in ("transformers", "accelerate", "rich", "yaml", "tensorboard"):
    require(_module, "train", "training")
