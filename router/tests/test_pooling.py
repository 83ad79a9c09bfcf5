"""How a model's hidden states become a vector."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from text_generation_router.pooling import pooling_of, vector_of
from text_generation_router.request import Pooling


@pytest.mark.parametrize(
    ("settings", "asked", "found"),
    [
        (None, None, Pooling.LAST),
        (None, "mean", Pooling.MEAN),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, None, Pooling.MEAN),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, None, Pooling.LAST),
        ({"pooling_mode": "mean"}, None, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, "last", Pooling.LAST),
    ],
)
def test_pooling_is_the_models(
    settings: dict[str, Any] | None, asked: str | None, found: Pooling, tmp_path: Path
) -> None:
    if settings is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    assert pooling_of(tmp_path, asked) is found


@pytest.mark.parametrize("settings", ['{"pooling_mode_cls_token": true}', "{}", "[]", "{"])
def test_a_pooling_that_is_not_known_is_refused(settings: str, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(settings)
    with pytest.raises(ValueError, match="--pooling last or --pooling mean"):
        pooling_of(tmp_path, None)


def test_a_vector_of_zeros_stays_one() -> None:
    assert list(vector_of(struct.pack("<2f", 0, 0), None, True)) == [0, 0]
