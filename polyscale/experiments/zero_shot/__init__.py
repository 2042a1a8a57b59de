"""HSA in a real pretrained model with no training: what it costs in accuracy, what it saves."""

from polyscale.experiments.zero_shot.command import Status, reproduce, status
from polyscale.experiments.zero_shot.pretrained import Pretrained, pretrained_model

__all__ = ["Pretrained", "Status", "pretrained_model", "reproduce", "status"]
