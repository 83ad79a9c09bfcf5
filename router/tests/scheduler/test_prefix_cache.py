"""What is shared is what was written, for just these tokens; what was used last stays longest."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.scheduler.blocks import BlockAllocator
from text_generation_router.scheduler.entry import BlockTable, Chain

BLOCK_SIZE = 2


def blocks_of(tokens: Sequence[int], make: type[bytes] = bytes) -> list[bytes]:
    """The tokens of its full blocks."""
    num = len(tokens) // BLOCK_SIZE
    return [make(tokens[n * BLOCK_SIZE : (n + 1) * BLOCK_SIZE]) for n in range(num)]


class Shelf:
    """An allocator, and texts that come and go as the Planner has them do."""

    def __init__(self, num_blocks: int, retains: bool = True) -> None:
        self.allocator = BlockAllocator(num_blocks, BLOCK_SIZE, retains)
        self.tables: list[BlockTable] = []

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """The blocks that hold its beginning."""
        return self.allocator.match(salt, blocks_of(tokens), {})[0]

    def fits(self, tokens: Sequence[int], salt: str = "") -> bool:
        """Whether there is room for a text and one token."""
        shared = self.match(tokens, salt)
        num_new = self.allocator.num_blocks_for(len(tokens) + 1) - len(shared)
        return num_new <= self.allocator.num_free - self.allocator.num_idle(shared)

    def write(self, tokens: Sequence[int], salt: str = "") -> BlockTable:
        """A table with the text, all of it published."""
        shared, chain = self.allocator.match(salt, blocks_of(tokens), {})
        table = self.allocator.allocate(len(tokens) + 1, shared)
        self.tables.append(table)
        unknown = blocks_of(tokens)[chain.num_blocks :]
        self.allocator.publish(chain, unknown, table[chain.num_blocks :])
        return table

    def release(self, table: BlockTable) -> None:
        """The text is not in use any more."""
        self.tables.remove(table)
        self.allocator.release(table)

    def integrity(self) -> None:
        """No block is lost."""
        held = {block_id for table in self.tables for block_id in table}
        assert self.allocator.num_used == len(held)


def test_tokens_are_compared_and_not_only_hashed() -> None:
    class Collides(bytes):
        def __hash__(self) -> int:
            return 1

    shelf = Shelf(10)
    table = shelf.allocator.allocate(5)
    shelf.allocator.publish(Chain(""), blocks_of([1, 2, 3, 4], Collides), table)
    for tokens, num in [([1, 3], 0), ([1, 2, 4, 3], 1), ([1, 2, 3, 4], 2)]:
        found, _ = shelf.allocator.match("", blocks_of(tokens, Collides), {})
        assert len(found) == num


def test_two_who_write_the_same_at_once() -> None:
    """The second goes on behind the first's blocks; its own are free with it."""
    shelf = Shelf(10)
    tables = [shelf.allocator.allocate(7) for _ in range(2)]
    shelf.tables += tables
    for table in tables:
        shelf.allocator.publish(Chain(""), blocks_of([1, 2, 3, 4]), table)
    assert shelf.match([1, 2, 3, 4]) == tables[0][:2]
    shelf.release(tables[1])
    assert shelf.allocator.num_cached == 2 and shelf.allocator.num_used == 4
    shelf.integrity()


def test_nothing_is_found_behind_an_evicted_block() -> None:
    """The second text is behind a block of the first's, which is given away: it goes on alone."""
    shelf = Shelf(5)
    first = shelf.write([1, 2])
    chain = Chain("")
    second = shelf.allocator.allocate(5)
    shelf.tables.append(second)
    shelf.allocator.publish(chain, blocks_of([1, 2, 3, 4]), second)
    assert shelf.match([1, 2, 3, 4]) == [first[0], second[1]]
    shelf.release(first)
    third = shelf.allocator.allocate(4)
    shelf.tables.append(third)
    assert shelf.match([1, 2]) == shelf.match([1, 2, 3, 4]) == []
    shelf.release(second)
    shelf.release(third)
    assert len(shelf.write([1, 2, 3, 4, 5, 6])) == 4, "its blocks are given away, too"
    shelf.integrity()


class Model:
    """The same, kept plainly: a text known up to a block is a key, its value when it was last in
    use; nothing is shared but by these keys."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.clock = 0
        self.known: dict[tuple[int, ...], int] = {}
        self.texts: list[list[int]] = []

    def num_in_use(self) -> int:
        shared = {tuple(text[:end]) for text in self.texts for end in _ends(text)}
        return len(shared) + len(self.texts)

    def match(self, tokens: list[int]) -> int:
        ends = [end for end in _ends(tokens) if tuple(tokens[:end]) in self.known]
        return len(ends)

    def write(self, tokens: list[int]) -> None:
        self.texts.append(tokens)
        for end in _ends(tokens):
            self.known[tuple(tokens[:end])] = self.clock
        while self.num_in_use() + self.num_idle() > self.num_blocks:
            idle = [text for text in self.known if not self.is_in_use(text)]
            # Least recently used first; of several used together, the longest.
            del self.known[min(idle, key=lambda text: (self.known[text], -len(text)))]

    def release(self, tokens: list[int]) -> None:
        self.texts.remove(tokens)
        self.clock += 1
        for end in _ends(tokens):
            if not self.is_in_use(tuple(tokens[:end])):
                self.known[tuple(tokens[:end])] = self.clock

    def is_in_use(self, text: tuple[int, ...]) -> bool:
        return any(tuple(held[: len(text)]) == text for held in self.texts)

    def num_idle(self) -> int:
        return sum(not self.is_in_use(text) for text in self.known)


def _ends(tokens: Sequence[int]) -> list[int]:
    return list(range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE))


_TEXT = st.lists(st.integers(1, 2), min_size=1, max_size=9)


@given(
    st.integers(2, 14),
    st.lists(st.one_of(_TEXT, st.integers(0, 9)), min_size=5, max_size=50),
)
def test_it_does_what_the_plain_model_does(num_blocks: int, events: list) -> None:
    """A list is a text that comes, a number one that goes."""
    shelf, model = Shelf(num_blocks), Model(num_blocks)
    running: list[tuple[list[int], BlockTable]] = []
    for event in events:
        if isinstance(event, list):
            if not shelf.fits(event):
                continue
            assert len(shelf.match(event)) == model.match(event)
            running.append((event, shelf.write(event)))
            model.write(event)
        elif running:
            tokens, table = running.pop(event % len(running))
            shelf.release(table)
            model.release(tokens)
        shelf.integrity()
        assert shelf.allocator.num_cached == len(model.known)
        assert shelf.allocator.num_used == model.num_in_use()
        for text in model.known:
            assert len(shelf.match(text)) == len(text) // BLOCK_SIZE
