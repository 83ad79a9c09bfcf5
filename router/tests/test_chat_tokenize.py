"""/chat_tokenize: the prompt of a chat and its tokens."""

from pathlib import Path

from router.tests.chats import serve_chat
from router.tests.serving import script_of, serve

CHAT = {"messages": [{"role": "user", "content": "né"}]}


async def test_text_and_tokens(tmp_path: Path) -> None:
    async with serve_chat(tmp_path, "x") as server:
        response = await server.client.post("/chat_tokenize", json=CHAT)
        assert response.status_code == 200
        answer = response.json()
        assert list(answer) == ["tokenize_response", "templated_text"]
        text = "<user>né<assistant>"
        assert answer["templated_text"] == text
        tokens = answer["tokenize_response"]
        assert [token["id"] for token in tokens] == script_of(text)
        assert tokens[6] == {"id": script_of("n")[0], "text": "n", "start": 6, "stop": 7}
        assert (tokens[-1]["text"], tokens[-1]["stop"]) == (">", len(text.encode()))
        assert server.services.metrics.request_count.value() == 1


async def test_key_and_missing_template(tmp_path: Path) -> None:
    async with serve(tmp_path, api_key=("Key",)) as server:
        response = await server.client.post("/chat_tokenize", json=CHAT)
        assert (response.status_code, response.content) == (401, b"")
        headers = {"authorization": "Bearer Key"}
        response = await server.client.post("/chat_tokenize", json=CHAT, headers=headers)
        assert response.status_code == 422
        assert response.json()["error_type"] == "template_error"
        assert response.json()["error"].startswith("Template error: template not found")
