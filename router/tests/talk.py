"""Raw bytes to a router, and what it answers."""

import asyncio
import json

from router.tests.serving import Server

HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
# Long, because the machine may be busy; waits for something that must not happen are shorter.
PATIENCE_S = 20


def of_body(body: bytes, head: bytes = POST) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def asking(num_tokens: int) -> bytes:
    return json.dumps({"inputs": "n", "parameters": {"max_new_tokens": num_tokens}}).encode()


class Talk:
    """One connection, spoken by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, server: Server, first: bytes = b"") -> "Talk":
        talk = cls(*await asyncio.open_connection("127.0.0.1", server.port))
        talk.writer.write(first)
        return talk

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            finally:
                self.writer.close()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of one answer that has a length."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return int(head.split()[1]), await self.reader.readexactly(length)


async def said(server: Server, first: bytes) -> bytes:
    return await (await Talk.to(server, first)).rest()


def check_refusal(answer: bytes, status: int) -> str:
    """The sentence of a refusal, whose form is TGI's."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0].startswith(b"http/1.1 %d " % status), answer
    assert b"connection: close" in lines and b"content-length: %d" % len(body) in lines
    assert b"content-type: application/json" in lines
    told = json.loads(body)
    assert told.keys() == {"error", "error_type"}
    assert told["error_type"] == ("overloaded" if status == 503 else "validation")
    return str(told["error"])
