import io

import pytest
from text_generation_router.offline import progress
from text_generation_router.offline.progress import Tally, bar, duration


@pytest.mark.parametrize(
    "seconds, expected",
    [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (725, "12 min 05 s"), (12000, "3 h 20 min")],
)
def test_durations(seconds, expected):
    assert duration(seconds) == expected


def test_a_line_counts_this_run_only_for_its_speed(monkeypatch):
    tally = Tally(100, done=50, first=50, started=0.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: 10.0)
    assert tally.line() == "50 of 100 requests, 0 tokens/s"
    tally.done, tally.tokens, tally.failed = 60, 12_340, 2
    assert tally.line() == "60 of 100 requests, 2 failed, 1,234 tokens/s, 40 s left"
    tally.done = 100
    assert "left" not in tally.line()


def test_a_bar_is_for_terminals(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with bar(Tally(3), io.StringIO()) as drawn:
        assert drawn is None


def test_a_bar_shows_the_counts():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, tally = Terminal(), Tally(3)
    with bar(tally, terminal) as drawn:
        tally.done, tally.failed, tally.tokens = 2, 1, 30
        drawn.show(tally)
        tally.done = 3
    assert "3/3" in terminal.getvalue()
    assert "tokens/s, 1 failed" in terminal.getvalue()
