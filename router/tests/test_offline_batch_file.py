import json
from pathlib import Path

import orjson
import pytest
from text_generation_router.offline.batch_file import (
    BatchFileError,
    LineError,
    ResultsFile,
    custom_id_of,
    error_line,
    read_lines,
    read_request,
    response_line,
)

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def encoded(**changes):
    """GOOD as a line, with changes; None leaves a field out."""
    return json.dumps({k: v for k, v in (GOOD | changes).items() if v is not None}).encode()


def test_a_request():
    request = read_request(encoded(more="is not read"))
    assert (request.custom_id, request.url) == ("a", "/v1/completions")
    assert json.loads(request.body) == {"prompt": "x"}
    assert custom_id_of(encoded()) == "a"


@pytest.mark.parametrize(
    "line, code, custom_id",
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (encoded(custom_id=None), "missing_custom_id", None),
        (encoded(custom_id=""), "missing_custom_id", None),
        (encoded(custom_id=3), "missing_custom_id", None),
        (encoded(method="GET"), "invalid_method", "a"),
        (encoded(method=None), "invalid_method", "a"),
        (encoded(url="/v1/models"), "invalid_url", "a"),
        (encoded(url=["/v1/completions"]), "invalid_url", "a"),
        (encoded(body=[]), "invalid_body", "a"),
        (encoded(body=None), "invalid_body", "a"),
        (encoded(body={"prompt": "x", "stream": True}), "invalid_body", "a"),
    ],
)
def test_what_is_not_a_request(line, code, custom_id):
    with pytest.raises(LineError) as caught:
        read_request(line)
    assert (caught.value.code, caught.value.custom_id) == (code, custom_id)
    assert custom_id_of(line) == custom_id
    result = json.loads(error_line(caught.value))
    assert result["id"].startswith("batch_req_")
    assert (result["custom_id"], result["response"]) == (custom_id, None)
    assert result["error"] == {"code": code, "message": str(caught.value)}


def test_blank_lines_and_a_byte_order_mark_are_nothing(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{1}\r\n\n   \n{2}")
    assert list(read_lines(path)) == [b"{1}", b"{2}"]


def test_a_result():
    line = response_line("a", 200, b'{"choices": []}')
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    result = json.loads(line)
    assert list(result) == ["id", "custom_id", "response", "error"]
    assert result["response"]["status_code"] == 200
    assert result["response"]["request_id"].startswith("req_")
    assert result["response"]["body"] == {"choices": []}
    assert result["error"] is None


def test_a_result_is_one_line_for_every_reader():
    body = orjson.dumps({"text": "a\x85b\u2028c\u2029d\x0b中"})
    lines = response_line("a", 200, body).decode().splitlines()
    assert json.loads(lines[0])["response"]["body"] == json.loads(body)
    assert len(lines) == 1


def test_results_are_continued(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    first = ResultsFile(path)
    assert (first.custom_ids, first.num_failed) == ([], 0)
    first.append(response_line("a", 200, b"{}"))
    first.append(response_line("b", 404, b"{}"))
    assert path.read_bytes().count(b"\n") == 2, "written as soon as it is appended"
    first.append(error_line(LineError("invalid_json_line", "x")))
    first.close()
    again = ResultsFile(path)
    assert (again.custom_ids, again.num_failed) == (["a", "b", None], 2)
    again.append(response_line("d", 200, b"{}"))
    again.close()
    ids = [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]
    assert ids == ["a", "b", None, "d"]


def test_a_torn_last_line_is_cut_wherever_it_is_torn(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    whole = response_line("a", 200, b"{}")
    torn = response_line("b", 200, '{"text": "é"}'.encode())
    for length in range(len(torn)):
        path.write_bytes(whole + torn[:length])
        results = ResultsFile(path)
        assert results.custom_ids == ["a"]
        results.append(torn)
        results.close()
        assert path.read_bytes() == whole + torn


@pytest.mark.parametrize("content", [b"notes\n", b"{}\n", b"[]\n", b'{"response": 3}\n'])
def test_another_file_is_left_alone(tmp_path: Path, content):
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(BatchFileError, match="is not a result of a batch"):
        ResultsFile(path)
    assert path.read_bytes() == content


def test_two_batches_on_one_file(tmp_path: Path):
    first = ResultsFile(tmp_path / "out.jsonl")
    with pytest.raises(BatchFileError, match="is being written by another batch"):
        ResultsFile(tmp_path / "out.jsonl")
    first.close()
    ResultsFile(tmp_path / "out.jsonl").close()


def test_a_file_that_can_not_be_written(tmp_path: Path):
    with pytest.raises(BatchFileError, match="can not be written: Is a directory"):
        ResultsFile(tmp_path)
