"""Which keys are good, when their file changes too; no key is kept."""

import logging
import os
import stat
from pathlib import Path

import pytest
from text_generation_router.edge.keys import MAX_FILE_BYTES, REREAD_EVERY_S, KeyFileError, Keys
from text_generation_router.request_options import ANYBODY, KeyLimits

NO_LIMITS = KeyLimits()
LATER = REREAD_EVERY_S


def private(path: Path, content: bytes) -> str:
    """Writes the file in place."""
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


def good(keys: Keys, now: float, *candidates: bytes) -> list[bytes]:
    """The keys that are accepted."""
    return [key for key in candidates if keys.caller(key, now) is not None]


def test_without_keys_anybody_may_ask() -> None:
    keys = Keys((), None, NO_LIMITS)
    assert not keys.are_asked_for
    assert keys.caller(None, 0) is keys.caller(b"x", 0) is ANYBODY


def test_one_key_shares_with_itself_and_two_do_not() -> None:
    one = Keys(("a",), None, NO_LIMITS)
    assert one.are_asked_for and one.caller(b"a", 0) is ANYBODY
    assert one.caller(None, 0) is one.caller(b"", 0) is one.caller(b"b", 0) is None
    assert Keys(("a", "a"), None, NO_LIMITS).caller(b"a", 0) is ANYBODY
    two = Keys(("a", "b"), None, NO_LIMITS)
    first, second = two.caller(b"a", 0), two.caller(b"b", 0)
    assert first is not None and second is not None
    assert first.salt != second.salt and len(first.salt) == len(second.salt) == 64
    assert two.caller(b"a", 1) is first and first.allowance is None
    # Another process has other salts, and each key an allowance of its own.
    again = Keys(("a", "b"), None, KeyLimits(max_tokens_per_minute=1))
    third, fourth = again.caller(b"a", 0), again.caller(b"b", 0)
    assert third is not None and fourth is not None
    assert third.salt != first.salt and third.allowance is not fourth.allowance is not None


@pytest.mark.parametrize(
    "content", [b"a\nb", b"# mine\n\n  a \r\n#b\r\n\tb\r\n", b"\xef\xbb\xbfa\nb\n", b"b\na\na"]
)
def test_one_key_a_line(tmp_path: Path, content: bytes) -> None:
    keys = Keys(("c",), private(tmp_path / "keys", content), NO_LIMITS)
    assert good(keys, 0, b"a", b"b", b"c", b"", b"#", b"# mine", b"#b", b"a\n", b"A") == [
        *(b"a", b"b", b"c")
    ]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    keys = Keys(("\udcff", "é"), private(tmp_path / "keys", b"\xfe\x00\xa0\n"), NO_LIMITS)
    assert good(keys, 0, b"\xff", "é".encode(), b"\xe9", b"\xfe\x00\xa0") == [
        *(b"\xff", "é".encode(), b"\xfe\x00\xa0")
    ]
    assert keys.caller(b"\xff" * 10**6, 0) is None


def test_a_change_counts_when_the_file_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys"
    keys = Keys(("given",), private(path, b"old"), NO_LIMITS)
    assert good(keys, 100, b"given", b"old") == [b"given", b"old"]
    stays = keys.caller(b"given", 100)
    path.write_bytes(b"new")
    assert good(keys, 100 + LATER / 2, b"old", b"new") == [b"old"]
    assert good(keys, 100 + LATER, b"given", b"old", b"new") == [b"given", b"new"]
    assert keys.caller(b"given", 100 + LATER) is stays
    assert [record.message for record in caplog.records] == [
        f"--api-key-file {path} was read again: 2 keys"
    ]


@pytest.mark.parametrize("content", [b"", b"\n  \n", b"# all\n# out", b"x" * (MAX_FILE_BYTES + 1)])
def test_a_file_that_can_not_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "keys"
    with pytest.raises(KeyFileError) as caught:
        Keys(("given",), private(path, content), NO_LIMITS)
    assert str(caught.value).startswith(f"--api-key-file {path} ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    keys = Keys((), private(path, b"a"), NO_LIMITS)
    path.write_bytes(content)
    for now in range(5):
        assert good(keys, now, b"a", b"") == [b"a"] and keys.are_asked_for
        assert keys.caller(None, now) is None
    [record] = caplog.records
    assert record.message.endswith("the keys that were read before stay valid")
    path.write_bytes(b"b")
    assert good(keys, 10, b"a", b"b") == [b"b"]


def test_a_file_that_is_gone_or_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    keys = Keys((), private(path, b"a"), NO_LIMITS)
    path.unlink()
    assert good(keys, 1, b"a") == [b"a"]
    path.mkdir()
    assert good(keys, 2, b"a") == [b"a"]
    path.rmdir()
    os.mkfifo(path)  # has no writer: reading it must not block
    assert good(keys, 3, b"a") == [b"a"]
    reasons = ("No such file or directory", "Is a directory", "is not a plain file")
    for record, reason in zip(caplog.records, reasons, strict=True):
        assert reason in record.message
    for bad in (str(path), str(tmp_path / "none"), "nul\0"):
        with pytest.raises(KeyFileError):
            Keys((), bad, NO_LIMITS)


def test_others_who_can_read_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = private(tmp_path / "keys", b"a")
    Keys((), path, NO_LIMITS)
    assert not caplog.records
    os.chmod(path, 0o600 | stat.S_IROTH)
    Keys((), path, NO_LIMITS)
    [record] = caplog.records
    assert record.levelname == "WARNING" and "can be read by all users" in record.message
