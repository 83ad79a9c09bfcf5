"""`text-generation-benchmark`, on shards that write a script."""

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console
from text_generation_router.benchmark.cli import create_parser, main
from text_generation_router.benchmark.display import BATCHES, display
from text_generation_router.benchmark.measure import Bench, BenchmarkError, Choice, Run, Shape
from text_generation_router.benchmark.report import Figures, Spread, as_csv, markdown
from text_generation_router.errors import GenerationError
from text_generation_router.request import Sampling
from text_generation_router.tokenizer import Tokenizer

from router.tests.serving import VOCAB_SIZE, ScriptedShards, script_of, write_tokenizer


def make_bench(folder: Path, num_blocks: int = 64) -> tuple[Bench, ScriptedShards]:
    """A bench on shards with blocks of 16 tokens."""
    write_tokenizer(folder)
    shards = ScriptedShards(script_of("hello "))
    choice = Choice(Sampling(), top_n_tokens=2)
    tokenizer = Tokenizer.load(folder)
    return Bench(shards, tokenizer, num_blocks, 16, VOCAB_SIZE, choice), shards


async def test_a_batch_is_one_prefill_and_the_steps_behind_it(tmp_path: Path):
    bench, shards = make_bench(tmp_path)
    seen = []
    prefill = shards.prefill

    async def spy(batch_id, entries, *rest):
        seen.extend(entries)
        return await prefill(batch_id, entries, *rest)

    shards.prefill = spy
    run = await bench.run(Shape(3, 20, 5))
    assert run.prefill_s > 0 and len(run.decode_s) == 4
    assert not shards.rows
    assert [len(entry.input_ids) for entry in seen] == [20] * 3
    tables = [entry.block_table.block_ids for entry in seen]
    assert len({block for table in tables for block in table}) == 6, (
        "25 tokens take two blocks each"
    )
    assert len({entry.input_ids for entry in seen}) == 3
    assert all(token_id < VOCAB_SIZE - 2 for entry in seen for token_id in entry.input_ids)
    assert all(entry.request.stopping.ignore_eos_token for entry in seen)
    again = await bench.run(Shape(1, 20, 1))
    assert again.decode_s == ()


async def test_what_does_not_fit_is_one_sentence(tmp_path: Path):
    bench, shards = make_bench(tmp_path, num_blocks=5)
    await bench.run(Shape(5, 8, 8))
    with pytest.raises(BenchmarkError, match="needs 6 KV blocks of 16 tokens, and there are 5"):
        await bench.run(Shape(3, 9, 8))
    assert not shards.rows


async def test_shards_that_fail_are_left_empty(tmp_path: Path):
    bench, shards = make_bench(tmp_path)
    shards.failure = GenerationError("Server error: no")
    with pytest.raises(GenerationError):
        await bench.run(Shape(2, 4, 4))
    shards.failure = None
    await bench.run(Shape(2, 4, 4))


def test_spread():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 2.0, 3.0, 3.0)
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 5.0, 5.0, 5.0)
    many = Spread.of([float(n) for n in range(101)])
    assert (many.p50, many.p90, many.p99) == (50.0, 90.0, 99.0)


def figures() -> list[Figures]:
    """Two runs of one batch, and one of a batch that has no decode steps."""
    first = Figures(Shape(2, 10, 3), [Run(0.1, (0.01, 0.03)), Run(0.2, (0.02, 0.02))])
    return [first, Figures(Shape(4, 5, 1), [Run(0.5, ())])]


def test_figures():
    first, second = figures()
    assert first.latencies_ms("prefill") == [100, 200]
    assert first.latencies_ms("decode_token") == [10, 30, 20, 20]
    assert first.latencies_ms("decode_total") == pytest.approx([40, 40])
    assert first.tokens_per_s("prefill") == [200, 100]
    assert first.tokens_per_s("decode_token") == pytest.approx([100, 100])
    assert second.latencies_ms("decode_total") == second.tokens_per_s("decode_total") == []
    assert set(second.as_dict()) == {"batch_size", "sequence_length", "decode_length", "prefill"}
    assert first.as_dict()["prefill"]["tokens_per_s"]["average"] == 150


def test_tables_for_people_and_for_programs():
    report = markdown({"model": "m"}, figures())
    assert "| model | m |" in report
    assert "| Prefill | 2 | 10 | 150.00 ms | 100.00 ms | 200.00 ms |" in report
    assert "| Decode (token) | 2 | 10 | 20.00 ms | 10.00 ms | 30.00 ms |" in report
    assert "| Decode | 2 | 10 | 100.0 tokens/s |" in report
    assert "Decode (token) | 4" not in report
    rows = list(csv.DictReader(io.StringIO(as_csv(figures()))))
    assert [(row["step"], row["batch_size"]) for row in rows] == [
        ("prefill", "2"),
        ("prefill", "4"),
        ("decode_token", "2"),
        ("decode_total", "2"),
    ]
    assert float(rows[0]["latency_ms_highest"]) == 200


def test_lines_where_there_is_no_terminal():
    file, [first, _] = io.StringIO(), figures()
    with display(Console(file=file), [first], 2, BATCHES) as shown:
        shown.show(first, 1, False)
        assert file.getvalue() == ""
        shown.show(first, 2, True)
    assert file.getvalue().startswith("batch size 2, sequence length 10, prefill ms ")
    assert file.getvalue().endswith("runs 2\n")


def test_a_table_on_a_terminal():
    file, all_figures = io.StringIO(), figures()
    console = Console(file=file, force_terminal=True, width=120)
    with display(console, all_figures, 3, BATCHES) as shown:
        shown.show(all_figures[0], 2, True)
    assert "prompt tokens/s" in file.getvalue() and "2/3" in file.getvalue()


def test_the_defaults_are_those_of_tgi():
    options = create_parser().parse_args([])
    assert options.batch_size == [1, 2, 4, 8, 16, 32]
    assert options.sequence_length == [10]
    assert (options.decode_length, options.runs, options.warmups) == (8, 10, 1)
    given = create_parser().parse_args(["-b", "1", "2", "--", "--dtype", "float32"])
    assert given.batch_size == [1, 2]
    assert given.launcher_flags == ["--dtype", "float32"]


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--batch-size", "0"], "must be at least 1"),
        (["--warmups", "-1"], "must be at least 0"),
        (["--output", "x.txt"], "must end in .csv or .json"),
        (["--output", "/nowhere/x.csv"], "does not exist"),
        (["-m", "/tmp/s-0", "--model-id", "a/b"], "remove --model-id"),
        (["-m", "/tmp/s-0"], "needs --tokenizer-name"),
    ],
)
def test_a_bad_command_line(argv, expected, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


def test_what_the_launcher_refuses_is_said_in_one_line(capsys):
    assert main(["--model-id", "/nowhere", "-b", "1"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("text-generation-benchmark: --model-id /nowhere does not exist")
    assert said.err.count("\n") == 1
    assert said.out == ""
