"""Requests are let in a few at a time; none once the front is closed."""

import asyncio

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from text_generation_router.edge.front import (
    PIECE_BYTES,
    STARTS_PER_TURN,
    STREAM,
    Front,
    in_pieces,
)


class App:
    """Notes in which turn of the event loop each request came in."""

    def __init__(self) -> None:
        self.turn = 0
        self.started: list[tuple[int, int]] = []
        self.is_over = asyncio.Event()
        self.is_over.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started.append((scope.get("number", -1), self.turn))
        if scope.get("method") == "POST":
            await self.is_over.wait()

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def receive() -> Message:
    raise AssertionError("nobody reads here")


async def send(message: Message) -> None:
    raise AssertionError("nobody answers here")


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "refused", "path": scope["path"]})


def opened(app: ASGIApp) -> Front:
    front = Front(refuse)
    front.app = app
    return front


def request(number: int, method: str = "POST", path: str = "/generate") -> Scope:
    return {"type": "http", "method": method, "path": path, "headers": [], "number": number}


async def test_a_burst_starts_in_order_a_few_in_each_turn() -> None:
    app = App()
    front = opened(app)
    counting = asyncio.create_task(app.count_turns())
    await asyncio.gather(*(front(request(number), receive, send) for number in range(30)))
    counting.cancel()
    assert [number for number, _ in app.started] == list(range(30))
    turns = [turn for _, turn in app.started]
    assert max(turns.count(turn) for turn in turns) == STARTS_PER_TURN
    assert turns[-1] - turns[0] <= 30 // STARTS_PER_TURN + 1, "turns without a start"


def test_a_single_request_does_not_wait() -> None:
    async def start() -> None:
        front = opened(App())
        for number in range(3):
            with pytest.raises(StopIteration):
                front(request(number), receive, send).send(None)

    asyncio.run(start())


async def test_other_methods_do_not_wait() -> None:
    app = App()
    front = opened(app)
    posts = [front(request(number), receive, send) for number in range(12)]
    gets = [front(request(100 + number, "GET"), receive, send) for number in range(12)]
    await asyncio.gather(*posts, *gets, front({"type": "lifespan"}, receive, send))
    numbers = [number for number, _ in app.started]
    assert numbers[STARTS_PER_TURN : STARTS_PER_TURN + 12] == list(range(100, 112))


async def test_the_places_of_requests_that_are_cancelled_are_given_to_others() -> None:
    app = App()
    front = opened(app)
    tasks = [asyncio.create_task(front(request(number), receive, send)) for number in range(20)]
    await asyncio.sleep(0)
    for task in tasks[5:15]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [number for number, _ in app.started] == [*range(5), *range(15, 20)]
    assert front.num_running == 0


async def test_streams_get_the_servers_own_send() -> None:
    found: list[Send] = []

    async def write(send: Send) -> None:
        found.append(send)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert STREAM in scope["extensions"]
        await send({"type": STREAM, "write": write})

    await opened(app)(request(0), receive, send)
    assert found == [send]


async def test_a_closed_front_refuses_all_but_scrapes_and_probes() -> None:
    app, refused = App(), []
    app.is_over.clear()

    async def note(message: Message) -> None:
        refused.append(message["path"])

    front = opened(app)
    # More than start at once: those that wait have come before, too.
    tasks = [asyncio.create_task(front(request(number), receive, note)) for number in range(6)]
    await asyncio.sleep(0)
    assert front.num_running == 6 and len(app.started) == STARTS_PER_TURN
    front.close()
    await front(request(7), receive, note)
    for number, path in enumerate(("/health", "/metrics", "/readyz"), start=8):
        await front(request(number, "GET", path), receive, note)
    assert refused == ["/generate", "/health"]
    app.is_over.set()
    await asyncio.gather(*tasks)
    assert sorted(number for number, _ in app.started) == [*range(6), 9, 10]
    assert front.num_running == 0


@pytest.mark.parametrize("is_more", [True, False])
async def test_large_bodies_are_sent_in_pieces(is_more: bool) -> None:
    sent: list[Message] = []

    async def keep(message: Message) -> None:
        sent.append(message)

    whole = bytes(range(256)) * 600
    sizes = [PIECE_BYTES, PIECE_BYTES, 22_528]
    message = {"type": "http.response.body", "body": whole, "more_body": is_more}
    await in_pieces(keep, keep)(message)
    assert [len(piece["body"]) for piece in sent] == sizes
    assert [piece["more_body"] for piece in sent] == [True, True, is_more]
    assert b"".join(piece["body"] for piece in sent) == whole
    sent.clear()
    small: list[Message] = [{"type": "http.response.start"}, {"type": "http.response.body"}]
    for one in small:
        await in_pieces(keep, keep)(one)
    assert sent == small
