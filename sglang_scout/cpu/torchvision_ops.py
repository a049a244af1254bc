"""Operator schemas that torchvision needs before it can be imported beside a CPU build of torch.

SGLang imports torchvision whatever the model is. PyPI's torchvision is a CUDA build: next to a CPU torch its compiled
part does not load, and its ``_meta_registrations`` then fails with "operator torchvision::nms does not exist". It
only wants the schemas to exist; nothing here calls the operators.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)

_OPS = ("nms", "qnms")
# The schemas live as long as this object: dropping it would undeclare them.
_library: Any = None


def declare() -> None:
    """Declare the schemas once per process; where a working torchvision has them already this changes nothing."""
    global _library
    if _library is not None:
        return
    import torch

    _library = torch.library.Library("torchvision", "FRAGMENT")
    for op in _OPS:
        try:
            _library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:
            logger.debug("torchvision::%s is declared already", op)
