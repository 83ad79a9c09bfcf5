"""Before any test imports Triton: without a GPU its kernels are interpreted."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
