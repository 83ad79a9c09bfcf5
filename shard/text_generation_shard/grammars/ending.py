"""Finds a short ending of a text with the matcher of its grammar alone.

Tokens are tried on copies of the matcher: first to states with new masks, nearest first; then in
random walks, as different states can have the same mask, as in `.*\\.py`. Words and characters that
the grammar itself contains are tried before others. An ending that was found is made shorter by
leaving out parts of it. Where these find none, a walk leaves one repetition after another. Finding
none proves nothing.

The same search finds the same ending: its random numbers have a fixed seed, and its limit is a
number of tried tokens.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

from llguidance import LLMatcher, LLTokenizer

# Characters that may close a value, or are one, come before all others.
_CLOSING = '"]}):,;>.0a'
_PRINTABLE = tuple(map(chr, (*range(32, 127), 10)))
# The parts of a grammar's source: characters that stand for themselves, for others or for a class,
# repetitions, which are left out, and what is between words.
_PART = re.compile(
    r"""\\(?P<escaped>[^\w\s])|\\(?P<control>[nrtdws])|\\.|(?P<plain>[^\\[\](){}*+?|.^$"/])"""
    r'|\[(?P<first>[^\\\]^"{])(?:\\.|[^\\\]"])*\]|(?P<again>[*+?])|.',
    re.S,
)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "d": "0", "w": "a", "s": " "}
# A text between quotes with a slash, which `_PART` takes for the border of a pattern: `"</think>"`.
_WITH_SLASH = re.compile(r'"([^"\\\n]*/[^"\\\n]*)"')
# A special token in Lark.
_SPECIAL = re.compile(r"<\[(\d+)\]>")
# Bounds of what is tried: words and signs of a grammar, and tokens of one state.
_MOST_WORDS, _LONGEST_WORD, _MOST_SIGNS, _MOST_TRIED = 64, 32, 200, 24
# Characters beyond ASCII that are tried before words.
_NUM_RARE = 8
# Steps of the walk that always takes the first step that is possible, which closes what is open;
# and tokens that are tried for a long text, where nothing else has found one.
_CLOSING_STEPS, _LONG_STEPS = 300, 4096
# A longer ending may have a shorter one that only the searches for long texts find.
_SHORT = 64
# Steps of the first random walks, and how often each of them takes the first step.
_WALK_STEPS, _SHARES = 32, (0.5, 0.0, 0.25, 0.0)
# The characters of an ending that may become zeros.
_NUM_ZEROS = 100
# During a generation, longer endings get none: a try takes 1 ms for 1800 tokens, and a step waits.
_LONGEST_ZEROED = 200
# How often a random walk repeats its last step: patterns repeat characters.
_AGAIN = 0.3


_Sign = tuple[int, int, list[int]]


def ends(matcher: LLMatcher, tokens: Sequence[int], eos: int) -> bool:
    """Whether `tokens` may follow and the text may end after them."""
    return matcher.validate_tokens([*tokens, eos]) == len(tokens) + 1


class EndingSearch:
    """Searches endings in the texts of one grammar; shared by its requests."""

    def __init__(self, tokenizer: LLTokenizer, source: str) -> None:
        """`source`: the Lark grammar, or the schema as JSON."""
        self._tokenizer = tokenizer
        # With the place of the bit of its first token in a mask.
        self._signs = [(it[0] >> 3, 1 << (it[0] & 7), it) for it in self._signs_of(source)]

    def find(
        self,
        matcher: LLMatcher,
        limit: int,
        num_steps: int,
        known: Sequence[Sequence[int]] | None = None,
    ) -> list[int] | None:
        """At most `limit` tokens after which the text may end; None: not found.

        `num_steps`: the most tried tokens. `known`: endings of other states, which are tried too;
        if it is given, the first ending that fits is returned, else a short one.
        """
        return _Search(self._tokenizer, self._signs, matcher, limit, num_steps).run(known)

    def _signs_of(self, source: str) -> Iterator[list[int]]:
        """The tokens of words and characters, in the order in which they are tried."""
        yield from ([int(token)] for token in _SPECIAL.findall(source))
        words = [""]
        for part in _PART.finditer(source):
            control = _CONTROL.get(part["control"] or "", "")
            if character := part["plain"] or part["escaped"] or part["first"] or control:
                words[-1] += character
            elif words[-1] and not part["again"]:
                words.append("")
        words = [*_WITH_SLASH.findall(source), *words]
        several = [word for word in dict.fromkeys(words) if 1 < len(word) <= _LONGEST_WORD]
        characters = dict.fromkeys("".join(words))
        rare = [character for character in characters if not character.isascii()][:_NUM_RARE]
        signs = dict.fromkeys([*_CLOSING, *rare, *several[:_MOST_WORDS], *characters, *_PRINTABLE])
        for sign in [*signs][:_MOST_SIGNS]:
            yield self._tokenizer.greedy_tokenize(sign)


class _Search:
    """Owns the remaining steps of one search, and its random numbers."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        signs: Sequence[_Sign],
        start: LLMatcher,
        limit: int,
        num_steps: int,
    ) -> None:
        self._tokenizer, self._signs = tokenizer, signs
        self._start, self._limit, self._num_steps = start, limit, num_steps
        self._eos = tokenizer.eos_token
        self._random = random.Random(0)
        # Whether `_nearest` has left states out.
        self._has_more = False

    def run(self, known: Sequence[Sequence[int]] | None) -> list[int] | None:
        """See EndingSearch.find."""
        if self._start.is_accepting():
            return []
        for ending in known or ():
            if len(ending) <= self._limit and ends(self._start, ending, self._eos):
                return list(ending)
        first = self._walk(min(_CLOSING_STEPS, self._num_steps // 2), 1.0)
        if first is not None and len(first) <= self._limit and known is not None:
            return first
        found = min(filter(None, (first, self._nearest(known or ()))), key=len, default=None)
        wide = self._wander() if found is None and self._has_more else None
        if wide is not None:
            found = self._with_zeros(self._shortened(self._units(wide)))
        elif found is not None and (known is None or self._limit < len(found) <= _LONGEST_ZEROED):
            found = min(found, self._with_zeros(self._units(found)), key=len)
        if known is None and (found is None or wide is not None or len(found) > _SHORT):
            found = min(filter(None, (found, self._long(wide is None))), key=len, default=None)
        return None if found is None or len(found) > self._limit else found

    def _long(self, is_first: bool) -> list[int] | None:
        """An ending by leaving repetitions; before, if it is the first, by closing what is open,
        words first."""
        self._num_steps = 2 * _LONG_STEPS * is_first
        walks = (self._walk(_LONG_STEPS, 1.0, preferred) for preferred in (" ", ""))
        found = [self._tokens(self._units(walk)) for walk in walks if walk is not None]
        if found or (left := self._leave(_LONG_STEPS)) is None:
            return min(found, key=len, default=None)
        return self._tokens(self._units(left))

    def _nearest(self, known: Sequence[Sequence[int]]) -> list[int] | None:
        """A best-first search by the number of tokens, in which each mask is visited once."""
        order = count()
        heap = [(0, next(order), self._start.deep_copy(), list[int](), False)]
        seen: set[bytes] = set()
        while heap and self._num_steps > 0:
            _, _, matcher, tokens, is_end = heappop(heap)
            if is_end:
                return tokens
            for ending in known:
                if ends(matcher, ending, self._eos):
                    return [*tokens, *ending]
            steps = self._steps(matcher)
            self._has_more |= len(steps) > _MOST_TRIED
            for step in steps[:_MOST_TRIED]:
                following, written = matcher.deep_copy(), [*tokens, *step]
                self._num_steps -= 1
                if len(written) > self._limit or not following.consume_tokens(step):
                    continue
                is_end = following.is_accepting()
                mask = b"" if is_end else following.compute_bitmask()
                if following.is_error():
                    continue
                if mask in seen:
                    self._has_more = True
                    continue
                seen |= {mask} - {b""}
                heappush(heap, (len(written), next(order), following, written, is_end))
        return None

    def _wander(self) -> list[int] | None:
        """Random walks, which become longer; they may exceed the limit, as parts are left out."""
        most = _WALK_STEPS
        while self._num_steps > 0:
            for share in _SHARES:
                if (found := self._walk(most, share)) is not None:
                    return found
            most = most * 5 // 4
        return None

    def _walk(self, most: int, share: float, preferred: str = "") -> list[int] | None:
        """At most `most` random steps; `share`: how often the first that is possible is taken, or
        the `preferred` one."""
        matcher, tokens, step = self._start.deep_copy(), list[int](), list[int]()
        before_all = self._tokenizer.greedy_tokenize(preferred)
        for _ in range(min(most, self._num_steps)):
            self._num_steps -= 1
            steps = self._steps(matcher)
            if not steps:
                return None
            if self._random.random() < share:
                step = before_all if before_all in steps else steps[0]
            elif step not in steps or self._random.random() > _AGAIN:
                # Half of the time one of the grammar itself.
                is_own = self._random.random() < 0.5
                step = self._random.choice(steps[:_MOST_TRIED] if is_own else steps)
            matcher.consume_tokens(step)
            tokens += step
            if matcher.is_accepting():
                return tokens
        return None

    def _leave(self, tries: int) -> list[int] | None:
        """A walk to the masks that it has seen least often: it leaves each repetition, such as
        `[a-z]+` in a pattern with many of them."""
        matcher, tokens, seen = self._start.deep_copy(), list[int](), Counter[bytes]()
        while not matcher.is_accepting():
            best: tuple[int, list[int], LLMatcher, bytes] | None = None
            for step in self._steps(matcher)[:_MOST_TRIED]:
                tries -= 1
                following = matcher.deep_copy()
                following.consume_tokens(step)
                mask = b"" if following.is_accepting() else following.compute_bitmask()
                if not following.is_error() and (best is None or seen[mask] < best[0]):
                    best = seen[mask], step, following, mask
                    if not best[0]:
                        break
            if best is None or tries <= 0 or len(tokens) > self._limit:
                return None
            _, step, matcher, mask = best
            tokens += step
            seen[mask] += 1
        return tokens

    def _steps(self, matcher: LLMatcher) -> list[list[int]]:
        """Tokens that may follow: forced ones, or those of signs, or some of all."""
        if forced := matcher.compute_ff_tokens():
            return [forced]
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return []
        some = [
            tokens
            for place, bit, tokens in self._signs
            if mask[place] & bit and matcher.validate_tokens(tokens) == len(tokens)
        ]
        if some:
            return some
        allowed = allowed_tokens(mask)
        return [[token] for token in allowed[:: -(-len(allowed) // _MOST_TRIED) or 1]]

    def _shortened(self, units: list[str | int]) -> list[str | int]:
        """The ending without parts that may be missing."""
        size = len(units) // 2
        while size and self._num_steps > 0:
            place = 0
            while place + size <= len(units):
                fewer = units[:place] + units[place + size :]
                if self._ends(fewer):
                    units = fewer
                else:
                    place += 1
            size = size * 3 // 4
        return units

    def _with_zeros(self, units: list[str | int]) -> list[int]:
        """The ending with zeros, of which tokens have many."""
        for place, unit in enumerate(units[:_NUM_ZEROS]):
            same = [*units[:place], "0", *units[place + 1 :]]
            if unit != "0" and self._num_steps > 0 and self._ends(same):
                units = same
        return self._tokens(units)

    def _ends(self, units: Sequence[str | int]) -> bool:
        self._num_steps -= 1
        return ends(self._start, self._tokens(units, is_quick=True), self._eos)

    def _units(self, tokens: Sequence[int]) -> list[str | int]:
        """The characters of an ending, and its special tokens; all tokens where it begins within a
        character."""
        units: list[str | int] = []
        data = b""
        for token in (*tokens, self._eos):
            if not self._tokenizer.is_special_token(token) and token != self._eos:
                data += self._tokenizer.decode_bytes([token])
                continue
            try:
                units += data.decode()
            except UnicodeDecodeError:
                return list(tokens)
            units.append(token)
            data = b""
        return units[:-1]

    def _tokens(self, units: Sequence[str | int], is_quick: bool = False) -> list[int]:
        """A tokenization, which is short unless it must be found quickly."""
        tokens: list[int] = []
        text = ""
        for unit in (*units, self._eos):
            if isinstance(unit, str):
                text += unit
                continue
            some = self._tokenizer.greedy_tokenize(text)
            if not is_quick:
                some = min(some, self._tokenizer.tokenize_str(text), key=len)
            tokens += [*some, unit]
            text = ""
        return tokens[:-1]


def allowed_tokens(mask: bytes) -> list[int]:
    """The tokens of a mask."""
    octets = ((place, octet) for place, octet in enumerate(mask) if octet)
    return [place * 8 + bit for place, octet in octets for bit in range(8) if octet >> bit & 1]
