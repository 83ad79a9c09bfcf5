"""`text-generation-benchmark` on shards that write a script."""

from pathlib import Path

import pytest
from text_generation_benchmark import BenchmarkError
from text_generation_benchmark.cli import create_parser, main
from text_generation_benchmark.shards import Batches, Bench, Choice, Run, Shape, markdown
from text_generation_process.sampling import Sampling
from text_generation_router.errors import GenerationError
from text_generation_router.text.tokenizer import Tokenizer

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

    async def spy(plan, *rest):
        seen.extend(plan.admitted)
        return await prefill(plan, *rest)

    shards.prefill = spy
    run = await bench.run(Shape(3, 20, 5))
    assert run.prefill_s > 0 and len(run.decode_s) == 4
    assert not shards.rows
    tables = [entry.block_table for entry in seen]
    assert len({block for table in tables for block in table}) == 6, "25 tokens take two blocks"
    assert len({entry.input_ids for entry in seen}) == 3
    assert all(len(entry.input_ids) == 20 for entry in seen)
    assert all(token_id < VOCAB_SIZE - 2 for entry in seen for token_id in entry.input_ids)
    assert all(entry.request.asked.ignore_eos_token for entry in seen)
    assert (await bench.run(Shape(1, 20, 1))).decode_s == ()


async def test_a_batch_that_does_not_fit_is_one_sentence(tmp_path: Path):
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


def test_figures_and_tables():
    first = Batches(Shape(2, 10, 3), [Run(0.1, (0.01, 0.03)), Run(0.2, (0.02, 0.02))])
    second = Batches(Shape(4, 5, 1), [Run(0.5, ())])
    found = first.as_dict()
    assert found["prefill"]["tokens_per_s"]["average"] == 150
    assert (found["decode_token"]["latency_ms"]["average"], found["batch_size"]) == (20, 2)
    assert found["decode_total"]["latency_ms"]["p50"] == pytest.approx(40)
    assert found["decode_token"]["tokens_per_s"]["p50"] == pytest.approx(100)
    assert set(second.as_dict()) == {"batch_size", "sequence_length", "decode_length", "prefill"}
    told = "batch size 4, sequence length 5, prefill 500.0 ms, 40.0 tokens/s"
    assert second.line() == told
    text = markdown({"model": "m"}, [first, second])
    assert "| model | m |" in text
    assert "| Prefill | 2 | 10 | 150.00 ms | 100.00 ms | 200.00 ms |" in text
    assert "| Decode (token) | 2 | 10 | 20.00 ms | 10.00 ms | 30.00 ms |" in text
    assert "| Decode | 2 | 10 | 100.00 tokens/s |" in text
    assert "Decode (token) | 4" not in text


def test_the_defaults_are_those_of_tgi():
    options = create_parser(is_of_server=False).parse_args([])
    assert options.batch_size == [1, 2, 4, 8, 16, 32]
    assert (options.sequence_length, options.decode_length) == ([10], 8)
    assert (options.runs, options.warmups) == (10, 1)
    parser = create_parser(is_of_server=False)
    given = parser.parse_args(["-b", "1", "2", "--", "--dtype", "float32"])
    assert (given.batch_size, given.launcher_flags) == ([1, 2], ["--dtype", "float32"])


@pytest.mark.parametrize(
    "argv, told",
    [
        (["--batch-size", "0"], "must be at least 1"),
        (["--warmups", "-1"], "must be at least 0"),
        (["-m", "/tmp/s-0", "--model-id", "a/b"], "remove --model-id"),
        (["-m", "/tmp/s-0"], "needs --tokenizer-name"),
    ],
)
def test_a_bad_command_line_exits_with_2(argv, told, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_an_error_of_the_launcher_is_one_line(capsys):
    assert main(["--model-id", "/nowhere", "-b", "1"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("text-generation-benchmark: --model-id /nowhere does not exist")
    assert (said.err.count("\n"), said.out) == (1, "")
