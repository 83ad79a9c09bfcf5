"""What all tests share: tiny real checkpoints, and how many examples a property is tried with."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported: its threads give up their core where they wait for each other. Beside a
# second process of tests, threads that spin take a test of 6 s of processor time 28.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# `--import-mode=importlib` leaves sys.path alone; the tests import `integration_tests.checkpoints`.
sys.path.insert(0, str(Path(__file__).parent))

from integration_tests.checkpoints import write_checkpoint

# A property that fails seldom is tried with more examples at night: `--hypothesis-profile nightly`.
settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("nightly", max_examples=1500, deadline=None)
settings.load_profile("quick")


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
