import io

from text_generation_router.offline import progress
from text_generation_router.offline.progress import Tally, bar


def test_the_rate_counts_the_tokens_of_this_run(monkeypatch):
    tally = Tally(100, done=50, started=0.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: 10.0)
    assert tally.rate == "0 tokens/s"
    tally.tokens, tally.failed = 12_340, 2
    assert tally.rate == "1,234 tokens/s, 2 failed"


def test_a_bar_is_for_terminals(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with bar(Tally(3), io.StringIO()) as is_drawn:
        assert not is_drawn


def test_a_bar_shows_the_counts():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, tally = Terminal(), Tally(3)
    with bar(tally, terminal) as is_drawn:
        assert is_drawn
        tally.done, tally.failed, tally.tokens = 3, 1, 30
    assert "3/3" in terminal.getvalue()
    assert "tokens/s, 1 failed" in terminal.getvalue()
