"""The engine's rows, batches, endings and failures, and tokens regardless of batch composition."""

from functools import partial
from typing import Any

import pytest
from text_generation_proto import pb
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.warmup import warm_up
from text_generation_shard.errors import BatchError, ModelError
from text_generation_shard.service import Batch

from shard.tests.driver import NUM_BLOCKS, Driver, changed, limits_of, prefill_of, step_of

GREEDY: dict[str, Any] = {}
SEEDED = {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "seed": 11}
PENALISED = {**SEEDED, "repetition_penalty": 1.3, "frequency_penalty": 0.4}


def alone(driver: Driver, request_id: int, ids: list[int], **options: Any) -> list[int]:
    driver.add([driver.request(request_id, ids, **options)])
    driver.run()
    return driver.tokens[request_id]


def test_length_end_token_and_ignored_end_token(driver: Driver) -> None:
    free_run = alone(driver, 0, [5, 6, 7], max_new_tokens=30, ignore_eos_token=True)
    assert driver.reasons[0] == pb.FINISH_REASON_LENGTH and len(free_run) == 30
    # Bias makes the end token the best one, always.
    sampling = {"logit_bias": ((0, 100.0),)}
    assert alone(driver, 1, [5, 6, 7], sampling=sampling) == [0]
    assert driver.reasons[1] == pb.FINISH_REASON_EOS_TOKEN
    ignoring = alone(driver, 2, [5, 6, 7], sampling=sampling, ignore_eos_token=True)
    assert ignoring == [0] * 8
    late = alone(driver, 3, [5, 6, 7], sampling=sampling, min_new_tokens=5)
    assert len(late) == 6 and 0 not in late[:5] and late[5] == 0
    # Also where it is the last token allowed: the router knows which of them each API tells.
    assert alone(driver, 4, [5, 6, 7], sampling=sampling, max_new_tokens=1) == [0]
    assert driver.reasons[4] == pb.FINISH_REASON_EOS_TOKEN


def test_stop_tokens_end_whatever_is_ignored(driver: Driver) -> None:
    sampling = {"logit_bias": ((7, 100.0), (0, 60.0))}
    options = {"sampling": sampling, "stop_token_ids": [9, 7], "ignore_eos_token": True}
    assert alone(driver, 1, [5, 6, 7], **options) == [7]
    assert driver.reasons[1] == pb.FINISH_REASON_STOP_TOKEN
    # Neither they nor end tokens come too early, and no other row ends with them.
    late = alone(driver, 2, [5, 6, 7], min_new_tokens=5, **options)
    assert len(late) == 6 and not {0, 7} & set(late[:5]) and late[5] == 7
    assert alone(driver, 3, [5, 6, 7], sampling=sampling) == [7] * 8
    # An end token is one first of all, unless it is ignored.
    ends = {"sampling": {"logit_bias": ((0, 100.0),)}, "stop_token_ids": [0]}
    assert alone(driver, 4, [5, 6, 7], **ends) == [0]
    assert driver.reasons[4] == pb.FINISH_REASON_EOS_TOKEN
    assert alone(driver, 5, [5, 6, 7], ignore_eos_token=True, **ends) == [0]
    assert driver.reasons[5] == pb.FINISH_REASON_STOP_TOKEN
    # As the last one that is allowed, too.
    assert alone(driver, 6, [5, 6, 7], max_new_tokens=1, **options) == [7]
    assert driver.reasons[6] == pb.FINISH_REASON_STOP_TOKEN


def test_top_tokens_only_if_requested(driver: Driver) -> None:
    requests = [driver.request(0, [4, 5], top_n_tokens=3), driver.request(1, [4, 5])]
    result = driver.add(requests).generations
    assert result.top_token_counts == [3, 0]
    assert result.top_token_ids[0] == result.token_ids[0]
    assert result.top_token_logprobs == sorted(result.top_token_logprobs, reverse=True)
    driver.run()


def test_filter_keeps_the_order_asked_for(driver: Driver) -> None:
    driver.add([driver.request(n, [n + 3] * 4, max_new_tokens=20) for n in range(4)])
    driver.running = driver.engine.filter([3, 0])
    assert driver.running == [3, 0]
    assert driver.engine.num_rows_taken == 2
    driver.run()
    assert (len(driver.tokens[3]), len(driver.tokens[1])) == (20, 1)


def test_steps_that_are_not_possible_are_refused(driver: Driver) -> None:
    engine = driver.engine
    with pytest.raises(BatchError, match="there is nothing to compute"):
        engine.step(*step_of(engine))
    driver.add([driver.request(1, [3], max_new_tokens=40)])
    long, stranger = driver.request(2, [3], max_new_tokens=500), driver.request(3, [3])
    # What is granted to a running request stays, for the router does not take it back.
    refused = step_of(engine, [driver.request(1, [3])], grown=[(1, driver.free.pop())])
    num_blocks = engine._table.num_blocks[engine._table.running[1]]
    for asked, sentence in (
        (refused, "is running already"),
        (step_of(engine, grown=[(55, 3)]), "not running"),
        (step_of(engine, chunks={55: 3}), "not running"),
        (step_of(engine, [long]), "500 new ones may follow, and all can be 400"),
        # Beyond the cache there is memory that belongs to something else.
        (
            step_of(engine, grown=[(1, NUM_BLOCKS)]),
            "request 1: there is no block 400, the cache has 400",
        ),
        (
            step_of(engine, [changed(stranger, block_table=[NUM_BLOCKS])]),
            "request 3: there is no block",
        ),
    ):
        with pytest.raises(BatchError, match=sentence):
            engine.step(*asked)
    assert engine._table.num_blocks[engine._table.running[1]] == num_blocks + 1
    for kept, sentence in (([], "at least one request"), ([1, 9], r"\[9\] are not running")):
        with pytest.raises(BatchError, match=sentence):
            engine.filter(kept)
    engine.clear()
    assert engine.num_rows_taken == 0


def test_a_step_sent_ahead_skips_ended_requests(driver: Driver) -> None:
    short = driver.request(1, [5, 6, 7], max_new_tokens=3, ignore_eos_token=True)
    driver.add([short, driver.request(2, [8, 9], ignore_eos_token=True)])
    engine = driver.engine
    first = step_of(engine, **driver.advance({}))
    grown = [(1, driver.free.pop())]
    second = step_of(engine, grown=grown, is_ahead=True)
    assert engine.step(*first).batch.request_ids == [1, 2]
    assert engine.step(*step_of(engine, is_ahead=True)).batch.request_ids == [2]
    # Request 1 ended meanwhile, and its table can not grow any more.
    result = engine.step(*second)
    assert result.generations.request_ids == [2] and result.batch.request_ids == [2]
    with pytest.raises(BatchError, match="request 1 is not running, its table can not grow"):
        engine.step(*step_of(engine, grown=grown))


def test_a_row_without_a_block_is_refused_and_runs_on_once_it_has_one(driver: Driver) -> None:
    ids = [3] * driver.engine.block_size
    request = driver.request(0, ids, max_new_tokens=4)
    bare = driver.add([changed(request, block_table=request.block_table[:1])])
    with pytest.raises(BatchError, match=r"\[0\] have no block"):
        driver.engine.step(*step_of(driver.engine))
    grown = [(0, driver.tables[0][1])]
    assert driver.engine.step(*step_of(driver.engine, grown=grown)).batch.request_ids == [0]
    assert bare.batch.request_ids == [0]
    driver.engine.clear()


def test_a_request_that_makes_no_sense_takes_no_row(driver: Driver) -> None:
    request = driver.request(0, [3, 4, 5])
    for changes, sentence in [
        ({"input_ids": [3] * 401}, "401 tokens"),
        ({"block_table": list(range(60))}, "in 60 of at most 26 blocks"),
        ({"block_table": []}, "in 0 of at most 26 blocks"),
        ({"num_prompt_tokens": 4}, "of 3 tokens, 4 of them its prompt"),
        ({"num_cached_tokens": 3}, "3 are cached, in 1 of"),
        ({"input_ids": [3, 4, 300]}, "token id 300 is not below 300"),
        ({"score_token_ids": (300,)}, "token id 300 is not below 300"),
        ({"input_ids": []}, "0 tokens"),
    ]:
        with pytest.raises(BatchError, match=sentence):
            driver.add([changed(request, **changes)])
    assert driver.engine.num_rows_taken == 0
    driver.add([request])
    with pytest.raises(BatchError, match="named twice"):
        driver.engine.filter([0, 0])
    driver.run()


def test_there_is_one_batch_by_the_number_it_was_given(driver: Driver) -> None:
    """As in the service: the running batch has the id of its first Prefill."""
    batch = Batch(driver.engine)
    first, second = driver.request(1, [4, 5, 6]), driver.request(2, [7, 8])
    engine = driver.engine
    prefill = partial(prefill_of, engine)
    for call, sentence in (
        (partial(batch.decode, [77], pb.Step()), "Batch ID 77 not found in cache"),
        (partial(batch.decode, [], pb.Step()), "Must provide at least one batch"),
        (partial(batch.prefill, prefill(1, [second], 78), {}), "Batch ID 78 not found in cache"),
    ):
        with pytest.raises(BatchError, match=sentence):
            call()
    answer = batch.finish(batch.prefill(prefill(1, [first]), {}))
    assert (answer.batch.id, list(answer.batch.request_ids)) == (1, [1])
    assert not answer.HasField("concat_ns")
    with pytest.raises(BatchError, match="batch 1 is running"):
        batch.prefill(prefill(2, [second]), {})
    with pytest.raises(BatchError, match="at least one request"):
        batch.prefill(prefill(2, [], 1), {})
    joined = batch.finish(batch.prefill(prefill(2, [second], 1), {}))
    assert (joined.batch.id, list(joined.batch.request_ids)) == (1, [1, 2])
    assert joined.HasField("concat_ns")
    answer = batch.finish(batch.decode([1], step_of(engine)[0]))
    assert list(answer.generations.request_ids) == [1, 2]
    with pytest.raises(BatchError, match="Batch ID 2 not found"):
        batch.decode([2], step_of(engine)[0])
    batch.clear(2)
    assert batch.filter(1, [2]) == [2]
    batch.clear(1)
    assert driver.engine.num_rows_taken == 0
    # A step that was sent ahead of that comes too late, and is no failure.
    late = batch.decode([1], step_of(engine, is_ahead=True)[0])
    assert late is None and not batch.finish(late).HasField("batch")
    with pytest.raises(BatchError, match="Batch ID 1 not found in cache"):
        batch.decode([1], step_of(engine)[0])


def test_limits_that_do_not_fit_name_the_numbers(engine: Engine) -> None:
    with pytest.raises(ModelError, match=r"max_total_tokens=500.*room for 320 tokens"):
        warm_up(engine, limits_of(64, 4, max_total_tokens=500, max_batch_total_tokens=320))
    with pytest.raises(ModelError, match=r"4000000000 needs .* GB"):
        warm_up(engine, limits_of(64, 4, max_batch_total_tokens=4 * 10**9))
    with pytest.raises(ModelError, match="at least 2"):
        warm_up(engine, limits_of(64, 4, max_total_tokens=1))
    for smallest in (2, 3, 64, 65):
        assert warm_up(engine, limits_of(64, 1, max_total_tokens=smallest)).num_blocks > 0
    result = warm_up(engine, limits_of(64, 4))
    assert result.max_total_tokens == 512 and result.max_input_tokens == 511
    assert result.num_blocks == 4 * 512 // engine.block_size
