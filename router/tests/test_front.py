"""A burst of requests is let in a few at a time."""

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from text_generation_router.edge.front import (
    DIRECT_SEND,
    PIECE_BYTES,
    STARTS_PER_TURN,
    Front,
    in_pieces,
)


class App:
    """Notes in which turn of the event loop each request came in."""

    def __init__(self) -> None:
        self.turn = 0
        self.started: list[tuple[Any, int]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started.append((scope.get("number"), self.turn))

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


def request(number: int, method: str = "POST") -> Scope:
    return {"type": "http", "method": method, "path": "/generate", "headers": [], "number": number}


async def test_a_burst_comes_in_order_and_by_and_by() -> None:
    app = App()
    front = Front(app, refuse)
    counting = asyncio.create_task(app.count_turns())
    await asyncio.gather(*(front(request(number), receive, send) for number in range(30)))
    counting.cancel()
    assert [number for number, _ in app.started] == list(range(30))
    turns = [turn for _, turn in app.started]
    assert max(turns.count(turn) for turn in turns) == STARTS_PER_TURN
    assert turns[-1] - turns[0] <= 30 // STARTS_PER_TURN + 1, (
        "turns went by in which nobody came in"
    )


async def test_who_comes_alone_does_not_wait() -> None:
    app = App()
    front = Front(app, refuse)
    for number in range(3):
        with_nobody_waiting = front(request(number), receive, send)
        try:
            with_nobody_waiting.send(None)
        except StopIteration:
            continue
        raise AssertionError("it waited")


async def test_others_do_not_stand_in_the_line() -> None:
    app = App()
    front = Front(app, refuse)
    posts = [front(request(number), receive, send) for number in range(12)]
    gets = [front(request(100 + number, "GET"), receive, send) for number in range(12)]
    await asyncio.gather(*posts, *gets, front({"type": "lifespan"}, receive, send))
    numbers = [number for number, _ in app.started]
    assert numbers[STARTS_PER_TURN : STARTS_PER_TURN + 12] == list(range(100, 112))


async def test_places_of_those_who_were_ended_are_given_to_others() -> None:
    app = App()
    front = Front(app, refuse)
    tasks = [asyncio.create_task(front(request(number), receive, send)) for number in range(20)]
    await asyncio.sleep(0)
    for task in tasks[5:15]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [number for number, _ in app.started] == [*range(5), *range(15, 20)]


async def test_nothing_goes_on_when_nobody_comes() -> None:
    app = App()
    front = Front(app, refuse)
    await asyncio.gather(*(front(request(number), receive, send) for number in range(9)))
    loop = asyncio.get_running_loop()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not loop._ready  # type: ignore[attr-defined]


async def test_streams_are_told_the_servers_own_send() -> None:
    told: list[Send] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        told.append(scope[DIRECT_SEND])

    scope = request(0)
    await Front(app, refuse)(scope, receive, send)
    assert told == [send]
    assert DIRECT_SEND not in scope, "a circle that only the garbage collector can break"


async def test_once_closed_it_refuses_all_but_scrapes() -> None:
    is_over = asyncio.Event()
    started: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.append(scope["number"])
        if scope["method"] == "POST":
            await is_over.wait()

    refused = []

    async def note(message: Message) -> None:
        refused.append(message["path"])

    front = Front(app, refuse)
    # More than are let in at once: those in the line have come before, too.
    tasks = [asyncio.create_task(front(request(number), receive, note)) for number in range(6)]
    await asyncio.sleep(0)
    assert front.num_running == 6 and len(started) == STARTS_PER_TURN
    front.close()
    await front(request(7), receive, note)
    await front(request(8, "GET") | {"path": "/health"}, receive, note)
    await front(request(9, "GET") | {"path": "/metrics"}, receive, note)
    assert refused == ["/generate", "/health"]
    is_over.set()
    await asyncio.gather(*tasks)
    assert sorted(started) == [*range(6), 9]
    assert front.num_running == 0


async def test_large_bodies_go_out_in_pieces() -> None:
    sent: list[Message] = []

    async def keep(message: Message) -> None:
        sent.append(message)

    whole = bytes(range(256)) * 600
    assert len(whole) == 2 * PIECE_BYTES + 22_528
    for is_more in (True, False):
        sent.clear()
        message = {"type": "http.response.body", "body": whole, "more_body": is_more}
        await in_pieces(keep)(message)
        assert [len(piece["body"]) for piece in sent] == [PIECE_BYTES, PIECE_BYTES, 22_528]
        assert [piece["more_body"] for piece in sent] == [True, True, is_more]
        assert b"".join(piece["body"] for piece in sent) == whole
    for message in (
        {"type": "http.response.start", "status": 200, "headers": []},
        {"type": "http.response.body"},
        {"type": "http.response.body", "body": whole[:PIECE_BYTES]},
    ):
        sent.clear()
        await in_pieces(keep)(message)
        assert sent == [message]
