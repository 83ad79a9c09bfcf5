"""Marks for parameters of tests."""

from typing import Any

import pytest


def at_night(*values: Any) -> list[Any]:
    """Parameters that only `make nightly` tries: they have smaller kin that always runs."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]
