"""/docs renders on a machine without a network."""

import re

from integration_tests.server import LauncherHandle

_REFERENCE = re.compile(r"""(?:src|href)\s*=\s*["']([^"']+)["']|url:\s*["']([^"']+)["']""")


def test_docs_need_nothing_from_elsewhere(server: LauncherHandle) -> None:
    page = server.client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "//" not in re.sub(r"^\s*//.*$|<!--.*?-->", "", page.text, flags=re.MULTILINE)
    references = [one or two for one, two in _REFERENCE.findall(page.text)]
    kinds = [reference.rsplit(".", 1)[-1] for reference in references]
    assert {"js", "css", "json"} <= set(kinds)
    for reference in references:
        assert reference.startswith("/")
        asset = server.client.get(reference)
        assert asset.status_code == 200, reference
        assert asset.content


def test_openapi_describes_every_route(server: LauncherHandle) -> None:
    document = server.client.get("/api-doc/openapi.json").json()
    assert set(document["paths"]) == {
        *("/", "/generate", "/generate_stream", "/health", "/info", "/metrics"),
        *("/livez", "/readyz", "/startupz"),
        *("/tokenize", "/chat_tokenize", "/invocations", "/vertex"),
        *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
        *("/v1/models", "/v1/models/{model}", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
        *("/livez", "/readyz", "/startupz"),
        *("/v2", "/v2/health/live", "/v2/health/ready"),
        *(f"/v2/models/{{model_name}}{end}" for end in ("", "/infer", "/ready")),
        "/v2/models/{model_name}/versions/{model_version}",
        "/v2/models/{model_name}/versions/{model_version}/infer",
        "/v2/models/{model_name}/versions/{model_version}/ready",
    }
    assert document["info"]["title"] == "Text Generation Inference"
