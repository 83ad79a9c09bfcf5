"""A planner without shards, for tests of what a step holds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from text_generation_router.request import FinishReason
from text_generation_router.scheduler.costs import StepCosts
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.planner import Planner
from text_generation_router.scheduler.step import Plan, StepResult

from router.tests.scheduling import check_integrity, make_limits, make_request, make_tokenizer

TOKENIZER = make_tokenizer()
# Parts of prompts beside a decoding row: two blocks of 4.
COSTS = StepCosts(decode_step_ns=200, num_rows=1, prefill_token_ns=25)
TWO_BLOCKS = {"costs": COSTS, "target_ns": 400.0}


class Desk:
    """A planner and the steps it makes; nothing is computed."""

    def __init__(self, **limits: Any) -> None:
        given = {"num_blocks": 100, "max_batch_size": 100, "max_batch_prefill_tokens": 100}
        self.planner = Planner(make_limits(**(given | limits)))
        self.num = 0

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 20, **options: Any) -> Entry:
        """Queues an entry; ids are 0, 1, …"""
        group = options.pop("group", None)
        request = make_request(prompt, max_new_tokens, **options)
        entry = Entry(self.num, request, TOKENIZER, group)
        self.planner.queue.append(entry)
        self.num += 1
        return entry

    def plan(self) -> Plan | None:
        """The next step."""
        self.planner.sweep()
        plan = self.planner.plan(self.planner.grow())
        check_integrity(self.planner)
        return plan

    def settle(
        self, plan: Plan, num_tokens: int = 1, ending: Sequence[int] = (), forward_ns: int = 0
    ) -> None:
        """Each entry that gets a token gets `num_tokens` times token 7."""
        ids = sorted(plan.asked)
        reasons = [FinishReason.EOS_TOKEN if i in ending else None for i in ids]
        tokens = [7] * (num_tokens * len(ids))
        counts = [num_tokens] * len(ids) if num_tokens > 1 else ()
        result = StepResult(ids, tokens, [0.0] * len(tokens), reasons, None, counts)
        self.planner.settle(plan, replace(result, forward_ns=forward_ns))
        check_integrity(self.planner)

    def step(self, num_tokens: int = 1) -> Plan:
        """A step that is planned and done."""
        plan = self.plan()
        assert plan is not None
        self.settle(plan, num_tokens)
        return plan


def ids(plan: Plan | None) -> list[int]:
    """Ids of the admitted entries."""
    return [] if plan is None else [entry.id for entry in plan.admitted]
