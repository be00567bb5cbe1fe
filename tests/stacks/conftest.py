"""What these tests share: no network, no accelerator, and torchvision without its compiled operators."""

from __future__ import annotations

import os

import torch

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}

#: Torchvision's operators that it registers fake versions of when it is imported.
OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def declare_operators() -> torch.library.Library | None:
    """Declare the operators that torchvision asks for, where its compiled ones do not load with this build of torch."""
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
