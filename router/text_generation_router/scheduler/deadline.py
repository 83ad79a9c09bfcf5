"""How long a step may take before the shards are declared lost."""

from dataclasses import dataclass

from text_generation_process.defaults import (
    CONTEXT_UNIT,
    LEAST_STEP_DEADLINE_ON_GPU_S,
    LEAST_STEP_DEADLINE_S,
    STEP_DEADLINE_FACTOR,
)

from text_generation_router.scheduler.chunked_prefill import StepCosts

# Where warm-up could measure nothing.
UNMEASURED_S = 300.0
# Ranks notice a missing rank first: they know which one it is.
BEHIND_RANKS_S = 1.0


@dataclass(frozen=True, slots=True)
class StepDeadlines:
    """The longest time of a step, by what it carries.

    By default that is the larger of `LEAST_STEP_DEADLINE_S` and `STEP_DEADLINE_FACTOR` times what
    warm-up has measured for the largest step with as many prompt tokens: they are at the end of the
    longest context, and all rows decode there. Nothing in a step takes longer:

    - It is an upper bound of the work. The factor covers what warm-up has not measured
      (log-probabilities of prompts, grammars, rows that are computed again because memory was
      short) and a slower machine.
    - One-time work is not part of a step. Warm-up is not watched. On a CPU the kernels are
      compiled, or loaded, before a shard listens, and warm-up samples in every way. On a GPU the
      first steps do more: therefore `LEAST_STEP_DEADLINE_ON_GPU_S`.
    """

    # The same for every step where it is all there is, as with --step-deadline.
    least_s: float
    decode_s: float = 0.0
    token_s: float = 0.0

    @classmethod
    def measured(
        cls, costs: StepCosts, num_rows: int, num_draft_tokens: int, longest: int, is_on_gpu: bool
    ) -> "StepDeadlines":
        """For up to `num_rows` rows of `longest` tokens, with `num_draft_tokens` draft tokens
        each."""
        if not costs.decode_step_ns:
            return cls(UNMEASURED_S)
        token_ns = costs.prefill_token_ns + costs.prefill_context_ns * longest / CONTEXT_UNIT
        decode_ns = costs.decode_step_ns * max(1.0, num_rows / costs.num_rows)
        decode_ns += num_rows * (1 + num_draft_tokens) * token_ns
        factor = STEP_DEADLINE_FACTOR
        least_s = LEAST_STEP_DEADLINE_ON_GPU_S if is_on_gpu else LEAST_STEP_DEADLINE_S
        return cls(least_s, factor * decode_ns / 1e9, factor * token_ns / 1e9)

    def behind_ranks(self, ranks_s: float) -> "StepDeadlines":
        """The same, but longer than ranks wait for one another."""
        least_s = max(self.least_s, ranks_s + BEHIND_RANKS_S)
        return StepDeadlines(least_s, self.decode_s, self.token_s)

    def work_s(self, num_prompt_tokens: int) -> float:
        """The expected time of such a step, without the factor."""
        return (self.decode_s + num_prompt_tokens * self.token_s) / STEP_DEADLINE_FACTOR

    def of(self, num_prompt_tokens: int) -> float:
        """Seconds for a step with that number of prompt tokens."""
        return max(self.least_s, self.decode_s + num_prompt_tokens * self.token_s)
