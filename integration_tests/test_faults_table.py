"""Each entry of docs/faults.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_fault_has_a_test() -> None:
    text = (ROOT / "docs" / "faults.md").read_text("utf-8")
    entries = re.findall(r"^- \*\*.*(?:\n .*)*", text, re.MULTILINE)
    assert len(entries) > 30
    for entry in entries:
        named = re.findall(r"`(\w[\w/]*\.py)(?:::(\w+))?`", entry)
        assert named, entry
        for file, function in named:
            source = (ROOT / file).read_text("utf-8")
            assert f"def {function or 'test_'}" in source, entry
