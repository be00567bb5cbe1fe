"""Imported for its effect: torchvision can be imported afterwards, even where its compiled operators do not load with
this build of torch. The packages that import it (torchmetrics, and so Lightning; transformers; timm) need that too."""

from __future__ import annotations

import torch

#: Operators that torchvision registers fake versions of when it is imported.
OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def declare_operators() -> torch.library.Library | None:
    """Declare the operators if torchvision cannot be imported without."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name, signature in OPERATORS.items():
            library.define(name + signature)
        return library
    return None


LIBRARY = declare_operators()  # kept: the declarations live as long as it does
