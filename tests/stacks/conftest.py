"""What these tests share: no network, no accelerator, and torchvision without its compiled operators."""

from __future__ import annotations

import os
import tempfile

import torchvision_operators  # noqa: F401

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_DIR": tempfile.gettempdir(),  # read once in a process, so that a test cannot change it
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}
