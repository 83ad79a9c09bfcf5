"""Before any test imports Triton: without a GPU its kernels are interpreted. And the engine that
most tests share."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if TYPE_CHECKING:
    from text_generation_shard.engine.engine import Engine

    from shard.tests.driver import Driver


@pytest.fixture(scope="module", params=["cpu", "stream"])
def engine(request: pytest.FixtureRequest, tiny_model_path: Path) -> "Engine":
    """Of the tiny model, on each of `driver.DEVICES`."""
    from shard.tests.driver import load_engine

    return load_engine(tiny_model_path, device=request.param)


@pytest.fixture
def driver(engine: "Engine") -> "Driver":
    """Drives an engine without requests."""
    from shard.tests.driver import Driver

    engine.clear()
    return Driver(engine)
