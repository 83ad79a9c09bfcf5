"""One owner of rows, cache and model: everything that happens on the device happens here.

All methods but the constructor are called from one thread, one at a time.
"""

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from text_generation_shard.arrays import Ints
from text_generation_shard.config import ShardConfig
from text_generation_shard.device.cpu import kernels, matrix
from text_generation_shard.device.cpu.cores import num_cores
from text_generation_shard.device.cpu.first_touch import FirstTouch, bring_first
from text_generation_shard.device.reference.kv_cache import CacheShape
from text_generation_shard.device.registry import create_backend
from text_generation_shard.engine import memory
from text_generation_shard.engine.batch import CachedBatch, RowRequest
from text_generation_shard.engine.forward_batch import Spans, plain_spans
from text_generation_shard.engine.ngram import Guesser
from text_generation_shard.engine.output import Chooser
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.engine.runner import Step, StepRunner
from text_generation_shard.engine.step import Advance, StepResult, WarmupLimits, WarmupResult
from text_generation_shard.engine.warmup import MEASURED_TOKENS, StepCosts, measure, rehearse
from text_generation_shard.errors import BatchError, ModelError
from text_generation_shard.models.config import ModelConfig
from text_generation_shard.models.llama import LlamaModel
from text_generation_shard.sampling.params import Watermark
from text_generation_shard.weights import Parameters

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Share of the machine's free memory that the KV cache may take when nobody says how much.
_CPU_MEMORY_SHARE = 0.5


class Engine:
    """Owns the model, the KV cache, the row table and the cached batches."""

    def __init__(self, config: ShardConfig) -> None:
        """Load the model; ModelError says in one sentence why it can not be served."""
        self.device = _device(config.device)
        self.model_config = ModelConfig.from_hf(
            config.model_path, config.rope_scaling, config.rope_factor
        )
        self.dtype = _dtype(config, self.model_config.dtype, self.device)
        self._config = config
        num_threads = torch.get_num_threads()
        uses_kernels = kernels.are_used(self.dtype, self.device)
        # The threads of a `kernels.team` do not wait for one whose core is taken: with two cores,
        # what the router does costs a step less than it would take by itself.
        rest = num_cores() - (1 if uses_kernels else num_threads)
        self.spares_core = self.device.type != "cpu" or rest > 0
        """Whether others find a core while a step is computed."""
        if uses_kernels:
            free_bytes = memory.available_cpu_bytes()
            kernels.prepare(self.dtype, config.quantize, num_threads, free_bytes)
        self._backend = create_backend("auto", self.model_config, self.dtype, self.device)
        if config.deterministic and not self.is_deterministic:
            raise ModelError(
                "--deterministic can not be kept by the operators that compute this model here "
                f"({self._backend.name} attention, {self.dtype}, {self.device.type}); leave it "
                "out, or use --device cpu with --dtype float32 or bfloat16"
            )
        parameters = Parameters(self.dtype, self.device, config.quantize)
        try:
            self._model = LlamaModel(parameters, self.model_config, self._backend)
            parameters.load(config.model_path)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                "the weights do not fit into the memory of the GPU; use --dtype bfloat16, a "
                "smaller model or a larger GPU"
            ) from error
        self.weights_bytes = parameters.nbytes
        if self.is_deterministic:
            # All that is large is computed by the kernels then. torch and they each have a pool of
            # threads, and the one that has just worked keeps the cores from the other for a while.
            torch.set_num_threads(1)
        self._chooser = Chooser(
            self.model_config.vocab_size,
            self.model_config.eos_token_ids,
            Watermark(config.watermark_gamma, config.watermark_delta),
            self.device,
        )
        self._is_stopping = threading.Event()
        self.first_touch = FirstTouch(lambda: self.num_rows_taken > 0)
        """Whoever serves runs it in a thread of its own."""
        self._max_prefill_tokens = 1
        self._use_table(0, 0, 0)
        self._batches: dict[int, CachedBatch] = {}
        self._costs = StepCosts(1, 1, 1, 0)

    @property
    def block_size(self) -> int:
        """Tokens in one KV block."""
        return self._backend.block_size

    @property
    def is_deterministic(self) -> bool:
        """Whether a request's tokens are the same, bit for bit, in whatever batch, however its
        prompt was cut and whatever was cached."""
        return self._backend.is_deterministic and matrix.are_deterministic(
            self.dtype, self._config.quantize, self.device
        )

    @property
    def attention_name(self) -> str:
        """The attention implementation in use."""
        return self._backend.name

    @property
    def recompute_at(self) -> int | None:
        """A sequence that grows beyond so many tokens is computed anew; None: never."""
        return self._model.rotary.recompute_at

    @property
    def prompt_scaled_at(self) -> int | None:
        """The KV of a longer prompt depends on its length; None: it never does."""
        return self._model.rotary.prompt_scaled_at

    @property
    def weight_regions(self) -> list[tuple[int, int]]:
        """See LlamaModel.weight_regions."""
        return self._model.weight_regions

    @property
    def num_rows_taken(self) -> int:
        """Rows in use; 0 when nothing runs."""
        return self._table.num_taken

    @torch.inference_mode()
    def warmup(self, limits: WarmupLimits) -> WarmupResult:
        """Allocate cache and rows, run first passes. Forgets everything that ran before.

        ModelError names the numbers when what is asked for does not fit.
        """
        self.clear(None)
        self.first_touch.follow(None)
        self._max_prefill_tokens = limits.max_prefill_tokens
        config = self.model_config
        sizes = config.num_layers, config.num_kv_heads, config.head_dim
        shape = CacheShape(*sizes, self._backend.block_size, self.dtype)
        available, activations = self._available_bytes(shape, limits)
        num_blocks, max_total = memory.cache_size(shape, limits, available, config.max_position)
        self._use_table(limits.max_batch_size, max_total, num_blocks)
        cache = self._backend.allocate(shape, num_blocks, self.device)
        if cache.parts is not None:
            bring_first(cache.parts, min(num_blocks, -(-MEASURED_TOKENS // shape.block_size)))
        self._costs = measure(self, limits.max_prefill_tokens, limits.max_batch_size, max_total)
        self.first_touch.follow(cache.parts)
        ledger = memory.Ledger(
            self.weights_bytes,
            cache.nbytes,
            f"{num_blocks} blocks of {shape.block_size} tokens",
            activations,
            f"{limits.max_prefill_tokens} prompt tokens beside {limits.max_batch_size} rows",
            memory.left_bytes(self.device, cache.nbytes, activations),
        )
        for line in ledger.lines():
            logger.info("%s", line)
        return WarmupResult(
            num_blocks=num_blocks,
            max_input_tokens=limits.max_input_tokens or max_total - 1,
            max_total_tokens=max_total,
            kv_cache_bytes=cache.nbytes,
            weights_bytes=self.weights_bytes,
            decode_step_ns=self._costs.full_ns,
            prefill_token_ns=self._costs.token_ns,
            # Where there are windows, the price does not go on growing as it begins.
            prefill_context_ns=0 if any(config.layer_windows) else self._costs.context_ns,
        )

    def prefill(
        self,
        batch_id: int,
        requests: Sequence[RowRequest],
        cached_batch_id: int | None,
        advance: Advance | None = None,
    ) -> StepResult:
        """Take requests in, compute their inputs or the first parts of them, and let the cached
        batch, which they join, advance in the same pass.

        If it fails, the new requests have no rows, and the cached batch is as it was but for the
        blocks that its tables grew by.
        """
        start = time.perf_counter_ns()
        if not requests:
            raise BatchError("a batch needs at least one request")
        if batch_id in self._batches:
            raise BatchError(f"batch {batch_id} is running already")
        cached = None if cached_batch_id is None else self._batch(cached_batch_id)
        if advance is not None and cached is None:
            raise BatchError("there is no cached batch that could advance")
        largest = max(max(item.input_ids, default=0) for item in requests)
        if largest >= self.model_config.vocab_size:
            raise BatchError(
                f"token id {largest} is not below {self.model_config.vocab_size}, the vocabulary"
            )
        rows: list[int] = []
        try:
            for request in requests:
                rows.append(self._table.take(request))
                self._guesser.forget(rows[-1])
            self.first_touch.note_use(1 + max(max(item.block_table) for item in requests))
            batch = CachedBatch(batch_id, [item.id for item in requests], np.array(rows))
            plain: Spans | None = None
            inputs: dict[int, tuple[int, int]] = {}
            if cached is not None and advance is not None:
                plain, inputs = self._advance(cached, advance)
            for row, request in zip(rows, requests, strict=True):
                inputs[row] = (request.num_cached_tokens, request.first_end)
            step = self._runner.run(plain, inputs)
        except BaseException:
            self._table.release(rows)
            raise
        concat_ns = None
        if cached is not None:
            before = time.perf_counter_ns()
            cached.join(batch)
            concat_ns = time.perf_counter_ns() - before
        result = self._finish(step, cached or batch, start)
        result.concat_ns = concat_ns
        return result

    def decode(self, batch_ids: Sequence[int], advance: Advance) -> StepResult:
        """Advance the batches, which become one: a token or more for every request whose input is
        computed, a part of the input for those named. After a failure the batches must be cleared:
        some may be joined and some tables grown."""
        start = time.perf_counter_ns()
        if not batch_ids:
            raise BatchError("Must provide at least one batch")
        if advance.is_ahead and not self._batches.keys() & set(batch_ids):
            return StepResult([], [], [], [])
        batches = [self._batch(batch_id) for batch_id in dict.fromkeys(batch_ids)]
        batch = batches[0]
        concat_ns = None
        for other in batches[1:]:
            batch.join(other)
            del self._batches[other.id]
            concat_ns = time.perf_counter_ns() - start
        plain, inputs = self._advance(batch, advance)
        if plain is None and not inputs:
            raise BatchError(f"every request of batch {batch.id} rests")
        result = self._finish(self._runner.run(plain, inputs), batch, start)
        result.concat_ns = concat_ns
        return result

    def filter(self, batch_id: int, request_ids: Sequence[int]) -> list[int]:
        """Keep these requests of a batch, in this order; the rows of the others are free again."""
        batch = self._batch(batch_id)
        if not request_ids:
            raise BatchError("Batch must have at least one request")
        if len(set(request_ids)) != len(request_ids):
            raise BatchError(f"a request is named twice in {list(request_ids)}")
        places = {request_id: place for place, request_id in enumerate(batch.request_ids)}
        if strangers := [item for item in request_ids if item not in places]:
            raise BatchError(f"requests {strangers} are not in batch {batch_id}")
        kept = set(request_ids)
        rows = batch.rows.tolist()
        self._table.release([rows[place] for item, place in places.items() if item not in kept])
        batch.keep([places[item] for item in request_ids])
        return list(batch.request_ids)

    def stop(self) -> None:
        """From any thread: a prompt that is computed in pieces fails at the next piece."""
        self._is_stopping.set()

    def clear(self, batch_id: int | None) -> None:
        """Forget a batch (absent is fine), or all."""
        ids = list(self._batches) if batch_id is None else [batch_id]
        for item in ids:
            batch = self._batches.pop(item, None)
            if batch is not None:
                self._table.release(batch.rows.tolist())

    def _use_table(self, capacity: int, max_total_tokens: int, num_blocks: int) -> None:
        self._table = RowTable(capacity, max_total_tokens, self.block_size, num_blocks)
        self._guesser = Guesser(capacity)
        self._runner = StepRunner(
            self._model,
            self._table,
            self._chooser,
            self.device,
            self._max_prefill_tokens,
            self._is_stopping,
        )

    def _batch(self, batch_id: int) -> CachedBatch:
        if batch_id not in self._batches:
            raise BatchError(f"Batch ID {batch_id} not found in cache.")
        return self._batches[batch_id]

    def _advance(
        self, batch: CachedBatch, advance: Advance
    ) -> tuple[Spans | None, dict[int, tuple[int, int]]]:
        """What the rows of a batch compute in this step: those whose inputs are computed, and
        row → [start, end) of the others that go on."""
        table = self._table
        for request_id, block in advance.grown:
            if not (advance.is_ahead and table.row(request_id) is None):
                table.grow(request_id, block)
        inputs: dict[int, tuple[int, int]] = {}
        for request_id, count in advance.chunks:
            row = table.row(request_id)
            if row is None or request_id not in batch.request_ids:
                raise BatchError(f"request {request_id} is not in batch {batch.id}")
            start, whole = int(table.lens[row]), int(table.input_lens[row])
            if count < 1 or start + count > whole or row in inputs:
                raise BatchError(
                    f"request {request_id}: {count} more tokens can not be computed of an input of "
                    f"{whole} tokens, {start} of which are"
                )
            inputs[row] = (start, start + count)
        rows = batch.rows
        is_unfinished = table.is_unfinished(rows)
        if any(is_unfinished.tolist()):
            rows = rows[~is_unfinished]
        if not len(rows):
            return None, inputs
        counts = None
        if advance.speculate:
            taken = len(rows) + sum(end - start for start, end in inputs.values())
            counts = self._guess(rows, advance.speculate, taken)
        starts = table.lens[rows]
        if counts is None:
            return plain_spans(rows, starts), inputs
        return Spans(rows, starts, counts + 1, counts + 1), inputs

    def _guess(self, rows: Ints, longest: int, num_tokens: int) -> Ints | None:
        """How many tokens are guessed of each row, None: of none; they stand behind those it knows.
        The step has `num_tokens` without them."""
        table, costs, limit = self._table, self._costs, self._model.rotary.recompute_at
        # A guess must give as many tokens for its time as the step does without it.
        price = len(rows) * costs.token_ns / (costs.single_ns + num_tokens * costs.token_ns)

        def limits_of(asked: Ints) -> Ints:
            lens = table.lens[asked]
            # Blocks, and tokens the request may still get: one comes without a guess.
            room = np.minimum(
                table.covered(asked) - lens,
                table.longest[asked] - lens - 1,
            )
            if limit is not None:
                # A row is computed anew between two steps.
                room = np.where(lens < limit, np.minimum(room, limit - lens), room)
            limits: Ints = np.clip(room - 1, 0, longest)
            return limits

        return self._guesser.guess(table, rows, limits_of, price)

    def _finish(self, step: Step, batch: CachedBatch, start: int) -> StepResult:
        """Write the step into the table, release the rows that ended, remember who runs on."""
        table = self._table
        for spans in step.passes:
            table.lens[spans.rows] = spans.ends
        for row, values in step.logprobs.items():
            table.prompt_logprobs[row] += values
        result = StepResult([], [], [], [])
        if (chosen := step.chosen) is not None:
            result, choices = chosen.result, step.choices
            table.token_ids[chosen.rows, chosen.positions] = chosen.token_ids
            if not choices.is_single:
                right = np.array(chosen.counts) - 1
                table.lens[choices.owners] = choices.known[choices.firsts] + right
                guessed = choices.ends - choices.firsts - 1
                self._guesser.learn(choices.owners, guessed, right)
            if table.prompt_logprobs:
                for row, request_id in zip(
                    choices.owners.tolist(), result.request_ids, strict=True
                ):
                    if row in table.prompt_logprobs:
                        values = table.prompt_logprobs.pop(row)
                        result.prefill_logprobs.append((request_id, values))
            if chosen.ended:
                table.release(chosen.ended)
                batch.keep(np.flatnonzero(~np.isin(batch.rows, chosen.ended)).tolist())
        if batch.request_ids:
            self._batches[batch.id] = batch
        else:
            self._batches.pop(batch.id, None)
        result.batch_id = batch.id
        result.running_ids = list(batch.request_ids)
        end = time.perf_counter_ns()
        result.forward_ns = step.forward - start
        result.decode_ns = end - step.forward
        result.total_ns = end - start
        return result

    def _available_bytes(self, shape: CacheShape, limits: WarmupLimits) -> tuple[int, int]:
        """What the KV cache may take, and what the largest step takes beside it."""
        config = self.model_config
        activations = memory.activation_bytes(config, shape, limits)
        if self.device.type == "cpu":
            if self._backend.gathers:
                activations += memory.gather_bytes(shape)
            available = memory.available_cpu_bytes() - activations
            return max(0, int(available * _CPU_MEMORY_SHARE)), activations
        # The largest pass runs in a cache just large enough for it; its peak is then set aside.
        tokens = limits.max_prefill_tokens
        num_blocks = tokens // shape.block_size + 2
        self._use_table(1, tokens + 2, num_blocks)
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            self._backend.allocate(shape, num_blocks, self.device)
            rehearse(self, tokens, tokens + 2)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"Not enough memory to handle {tokens} prefill tokens. "
                "You need to decrease `--max-batch-prefill-tokens`"
            ) from error
        available, measured = memory.available_cuda_bytes(
            self.device, self._config.cuda_memory_fraction
        )
        # What that pass did not do: gather the blocks of a decode, sample for all rows.
        rest = memory.gather_bytes(shape) + memory.sampling_bytes(config, limits)
        return max(0, available - rest), measured + rest


def _device(name: str | None) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ModelError("--device cuda was asked for, but torch finds no CUDA device; use cpu")
    return torch.device(name or ("cuda" if has_cuda else "cpu"))


def _dtype(config: ShardConfig, checkpoint: str, device: torch.device) -> torch.dtype:
    """As asked for; else the type of the kernels for quantised weights, float32 on cpu, as TGI, and
    the checkpoint's own type on cuda."""
    if config.dtype is not None:
        return DTYPES[config.dtype]
    if config.quantize is not None:
        return torch.bfloat16
    return torch.float32 if device.type == "cpu" else DTYPES.get(checkpoint, torch.float16)
