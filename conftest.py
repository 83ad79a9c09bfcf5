"""Fixtures shared by the shard's tests and the integration tests: tiny real checkpoints."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# `--import-mode=importlib` leaves sys.path alone; the tests import `integration_tests.checkpoints`.
sys.path.insert(0, str(Path(__file__).parent))

from integration_tests.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the directory of a tiny checkpoint of a family; each is written once a session."""
    root = tmp_path_factory.mktemp("checkpoints")

    def directory_of(family: str) -> Path:
        directory = root / family
        if not directory.exists():
            write_checkpoint(family, directory)
        return directory

    return directory_of


@pytest.fixture(scope="session")
def tiny_model_path(checkpoint: Callable[[str], Path]) -> Path:
    """A Llama 3 shaped checkpoint: 3 layers, hidden 64, 4 heads over 2, 300 tokens, tied."""
    return checkpoint("llama3")
