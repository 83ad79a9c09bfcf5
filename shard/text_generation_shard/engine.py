"""One owner of rows, cache and model: everything that happens on the device happens here.

All methods but the constructor are called from one thread, one at a time.
"""

import logging
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_shard import memory
from text_generation_shard.attention.base import MAX_GATHER_TOKENS
from text_generation_shard.attention.registry import create_backend
from text_generation_shard.batch import CachedBatch, RowRequest, RowTable
from text_generation_shard.config import ShardConfig
from text_generation_shard.errors import BatchError, ModelError
from text_generation_shard.grammar import GrammarMasks, StepGrammars
from text_generation_shard.kv_cache import CacheShape
from text_generation_shard.models.config import ModelConfig
from text_generation_shard.models.llama import LlamaModel
from text_generation_shard.ragged import RaggedBuilder, pieces
from text_generation_shard.sampling import (
    Choice,
    SamplingColumns,
    SamplingParams,
    TokenHistory,
    Watermark,
    sample,
    top_tokens,
)
from text_generation_shard.step import FinishReason, StepResult, WarmupLimits, WarmupResult
from text_generation_shard.weights import Parameters

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Rows of prompt logits computed at once: bounds their memory to this many vocabularies.
_LOGPROB_ROWS = 256
# Share of the machine's free memory that the KV cache may take when nobody says how much.
_CPU_MEMORY_SHARE = 0.5
# What sampling with every parameter takes per row and vocabulary entry: some float32 and float64
# copies of the scores, and their order.
_SAMPLING_BYTES = 50


class Engine:
    """Owns the model, the KV cache, the row table and the cached batches."""

    def __init__(self, config: ShardConfig) -> None:
        """Load the model; ModelError says in one sentence why it can not be served."""
        self.device = _device(config.device)
        self.model_config = ModelConfig.from_hf(
            config.model_path, config.rope_scaling, config.rope_factor
        )
        self.dtype = _dtype(config.dtype, self.model_config.dtype, self.device)
        self._config = config
        self._watermark = Watermark(config.watermark_gamma, config.watermark_delta)
        self._backend = create_backend("torch")
        parameters = Parameters(self.dtype, self.device)
        try:
            self._model = LlamaModel(parameters, self.model_config, self._backend)
            parameters.load(config.model_path)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                "the weights do not fit into the memory of the GPU; use --dtype bfloat16, a "
                "smaller model or a larger GPU"
            ) from error
        self.weights_bytes = parameters.nbytes
        self._is_stopping = threading.Event()
        self._masks = GrammarMasks(self.model_config.vocab_size, self.device)
        self._eos = torch.tensor(self.model_config.eos_token_ids, dtype=torch.int64)
        self._use_table(RowTable(0, 0, self._backend.block_size))
        self._batches: dict[int, CachedBatch] = {}
        self._max_prefill_tokens = 1

    @property
    def block_size(self) -> int:
        """Tokens in one KV block."""
        return self._backend.block_size

    @property
    def attention_name(self) -> str:
        """The attention implementation in use."""
        return self._backend.name

    @property
    def recompute_at(self) -> int | None:
        """A sequence that grows beyond so many tokens is computed anew; None: never."""
        return self._model.rotary.recompute_at

    @property
    def num_rows_taken(self) -> int:
        """Rows in use; 0 when nothing runs."""
        return self._table.num_taken

    @torch.inference_mode()
    def warmup(self, limits: WarmupLimits) -> WarmupResult:
        """Allocate cache and rows, run a first pass. Forgets everything that ran before.

        ModelError names the numbers when what is asked for does not fit.
        """
        self.clear(None)
        self._max_prefill_tokens = limits.max_prefill_tokens
        shape = CacheShape(
            self.model_config.num_layers,
            self.model_config.num_kv_heads,
            self.model_config.head_dim,
            self._backend.block_size,
            self.dtype,
        )
        available = self._available_bytes(shape, limits)
        num_blocks, max_total = memory.cache_size(
            shape, limits, available, self.model_config.max_position
        )
        self._use_table(RowTable(limits.max_batch_size, max_total, shape.block_size))
        cache = self._backend.allocate(shape, num_blocks, self.device)
        self._rehearse(max(1, min(64, limits.max_prefill_tokens, max_total - 2)), max_total)
        logger.info(
            "memory: weights %.2f GB, KV cache %.2f GB (%d blocks of %d tokens)",
            self.weights_bytes / 1e9,
            cache.nbytes / 1e9,
            num_blocks,
            shape.block_size,
        )
        return WarmupResult(
            num_blocks=num_blocks,
            max_input_tokens=limits.max_input_tokens or max_total - 1,
            max_total_tokens=max_total,
            kv_cache_bytes=cache.nbytes,
            weights_bytes=self.weights_bytes,
        )

    @torch.inference_mode()
    def prefill(
        self, batch_id: int, requests: Sequence[RowRequest], cached_batch_id: int | None
    ) -> StepResult:
        """Compute prompts and first tokens. If it fails, no row is taken and no batch changed."""
        start = time.perf_counter_ns()
        if not requests:
            raise BatchError("a batch needs at least one request")
        if batch_id in self._batches:
            raise BatchError(f"batch {batch_id} is running already")
        cached = None if cached_batch_id is None else self._batch(cached_batch_id)
        largest = max(max(item.input_ids, default=0) for item in requests)
        if largest >= self.model_config.vocab_size:
            raise BatchError(
                f"token id {largest} is not below {self.model_config.vocab_size}, the vocabulary"
            )
        rows: list[int] = []
        try:
            for request in requests:
                rows.append(self._table.take(request))
            batch = CachedBatch(batch_id, [item.id for item in requests], torch.tensor(rows))
            grammars = self._masks.start(self._table.constraints_of(batch.rows))
            logits, logprobs = self._prefill_rows(rows)
            forward = time.perf_counter_ns()
            self._table.lens[batch.rows] = torch.tensor([len(item.input_ids) for item in requests])
            result = self._choose(batch, logits, grammars)
        except BaseException:
            self._table.release(rows)
            raise
        result.prefill_logprobs = logprobs
        if cached is not None and batch.request_ids:
            before = time.perf_counter_ns()
            cached.join(batch)
            result.concat_ns = time.perf_counter_ns() - before
        return self._finish(result, cached or batch, start, forward)

    @torch.inference_mode()
    def decode(self, batch_ids: Sequence[int], grown: Sequence[tuple[int, int]]) -> StepResult:
        """One token for every request of the batches, which become one; `grown` pairs request ids
        with their new last blocks. After a failure the batches must be cleared: some may be joined
        and some tables grown."""
        start = time.perf_counter_ns()
        if not batch_ids:
            raise BatchError("Must provide at least one batch")
        batches = [self._batch(batch_id) for batch_id in dict.fromkeys(batch_ids)]
        batch = batches[0]
        concat_ns = None
        for other in batches[1:]:
            batch.join(other)
            del self._batches[other.id]
            concat_ns = time.perf_counter_ns() - start
        for request_id, block in grown:
            self._table.grow(request_id, block)
        self._table.check_covered(batch.rows)
        self._recompute(batch)
        grammars = self._masks.start(self._table.constraints_of(batch.rows))
        hidden = self._model.forward(self._builder.decode_batch(batch.rows))
        logits = self._model.logits(hidden)
        self._synchronize()
        forward = time.perf_counter_ns()
        rows = batch.rows
        self._table.lens[rows] += 1
        try:
            result = self._choose(batch, logits, grammars)
        except BaseException:
            self._table.lens[rows] -= 1
            raise
        result.concat_ns = concat_ns
        return self._finish(result, batch, start, forward)

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

    def _use_table(self, table: RowTable) -> None:
        self._table = table
        self._builder = RaggedBuilder(table, self.device, self._model.rotary.length_rule)

    def _batch(self, batch_id: int) -> CachedBatch:
        if batch_id not in self._batches:
            raise BatchError(f"Batch ID {batch_id} not found in cache.")
        return self._batches[batch_id]

    def _finish(
        self, result: StepResult, batch: CachedBatch, start: int, forward: int
    ) -> StepResult:
        """Remember who runs on, and read the clocks."""
        if batch.request_ids:
            self._batches[batch.id] = batch
        else:
            self._batches.pop(batch.id, None)
        result.batch_id = batch.id
        result.running_ids = list(batch.request_ids)
        end = time.perf_counter_ns()
        result.forward_ns = forward - start
        result.decode_ns = end - forward
        result.total_ns = end - start
        return result

    def _prefill_rows(self, rows: list[int]) -> tuple[Tensor, list[tuple[int, list[float]]]]:
        """Logits [R, vocab] of the last token of each row, and the prompt log-probabilities."""
        requests = [self._table.request(row) for row in rows]
        spans = [(item.num_cached_tokens, len(item.input_ids)) for item in requests]
        logits: dict[int, Tensor] = {}
        logprobs: dict[int, list[float]] = {
            row: [float("nan")]
            for row, item in zip(rows, requests, strict=True)
            if item.prefill_logprobs
        }
        for piece in pieces(rows, spans, self._max_prefill_tokens):
            if self._is_stopping.is_set():
                raise BatchError("the shard is stopping")
            batch = self._builder.piece_batch(piece)
            hidden = self._model.forward(batch)
            scores = self._model.logits(hidden[batch.logits_indices])
            ending = [
                place for place in range(len(piece.rows)) if self._builder.ends_in(piece, place)
            ]
            for index, place in enumerate(ending):
                logits[piece.rows[place]] = scores[index]
            for place, row in enumerate(piece.rows):
                if row in logprobs:
                    part = hidden[batch.cu_seqlens_q[place] : batch.cu_seqlens_q[place + 1]]
                    logprobs[row] += self._prompt_logprobs(part, row, piece.starts[place])
        self._synchronize()
        answers = [(self._table.request(row).id, values) for row, values in logprobs.items()]
        return torch.stack([logits[row] for row in rows]), answers

    def _prompt_logprobs(self, hidden: Tensor, row: int, start: int) -> list[float]:
        """Log-probabilities of the tokens that follow positions start, start + 1, …"""
        known = len(self._table.request(row).input_ids)
        targets = self._table.token_ids[row, start + 1 : min(start + 1 + len(hidden), known)]
        values: list[float] = []
        for first in range(0, len(targets), _LOGPROB_ROWS):
            wanted = targets[first : first + _LOGPROB_ROWS].to(self.device, torch.int64)
            logits = self._model.logits(hidden[first : first + len(wanted)])
            scores = torch.log_softmax(logits, dim=-1).gather(1, wanted[:, None])
            values += scores[:, 0].tolist()
        return values

    def _recompute(self, batch: CachedBatch) -> None:
        """Longrope: a row that outgrows the original context gets all its KV with the long factors,
        as transformers' Phi-3 does, so that a row's state depends on its tokens alone."""
        limit = self._model.rotary.recompute_at
        if limit is None:
            return
        rows = batch.rows[self._table.lens[batch.rows] == limit].tolist()
        for piece in pieces(rows, [(0, limit)] * len(rows), self._max_prefill_tokens):
            self._model.forward(self._builder.piece_batch(piece))

    def _choose(
        self, batch: CachedBatch, logits: Tensor, grammars: StepGrammars | None
    ) -> StepResult:
        """Sample, write the tokens into the table, release the rows that ended."""
        table, rows = self._table, batch.rows
        requests = [table.request(row) for row in rows.tolist()]
        if batch.columns is None:
            params = [item.sampling for item in requests]
            batch.columns = SamplingColumns(params, self._watermark, self.device)
        known, prompt_lens = table.lens[rows], table.prompt_lens[rows]
        width = int(known.max())
        history = TokenHistory(table.token_ids[rows, :width], known, prompt_lens)
        generated = known - prompt_lens
        if grammars is not None:
            grammars.restrict(logits)
        choice = sample(logits, batch.columns, history, self._forbidden(rows, generated))
        token_ids = choice.token_ids.cpu()
        if grammars is not None:
            grammars.settle(choice, token_ids)
        table.token_ids[rows, known] = token_ids.to(torch.int32)
        is_eos = torch.isin(token_ids, self._eos) & ~table.ignore_eos[rows]
        reasons = torch.where(is_eos, int(FinishReason.EOS_TOKEN), int(FinishReason.NONE))
        # Length wins over an end token that arrives with the last one allowed, as in TGI.
        is_last = generated + 1 >= table.max_new_tokens[rows]
        failures: dict[int, str] = {}
        if grammars is not None:
            failures = grammars.failures()
            # A text that was ended early for want of tokens is no natural ending either.
            is_last |= is_eos & grammars.is_driven(len(rows))
        reasons[is_last] = int(FinishReason.LENGTH)
        reasons[list(failures)] = int(FinishReason.ERROR)
        result = StepResult(
            request_ids=list(batch.request_ids),
            token_ids=token_ids.tolist(),
            logprobs=choice.logprobs.tolist(),
            finish_reasons=reasons.tolist(),
            errors=[(batch.request_ids[place], error) for place, error in failures.items()],
        )
        _add_top_tokens(result, requests, choice)
        self._release_ended(batch, reasons)
        return result

    def _release_ended(self, batch: CachedBatch, reasons: Tensor) -> None:
        ended = reasons != int(FinishReason.NONE)
        if bool(ended.any()):
            self._table.release(batch.rows[ended].tolist())
            batch.keep((~ended).nonzero()[:, 0].tolist())

    def _forbidden(self, rows: Tensor, generated: Tensor) -> Tensor | None:
        """(row, end token) pairs of rows that must not end yet."""
        early = (generated < self._table.min_new_tokens[rows]).nonzero()[:, 0]
        if not len(early) or not len(self._eos):
            return None
        return torch.cartesian_prod(early, self._eos).to(self.device)

    def _rehearse(self, num_tokens: int, max_total: int) -> None:
        """One prefill and, if there is room, one decode: the first request finds warm kernels."""
        blocks = range(-(-(num_tokens + 1) // self.block_size))
        new = min(2, max_total - num_tokens)
        request = RowRequest(0, [0] * num_tokens, num_tokens, 0, blocks, SamplingParams(), new)
        result = self.prefill(0, [request], None)
        if result.running_ids:
            self.decode([0], [])
        self.clear(None)

    def _available_bytes(self, shape: CacheShape, limits: WarmupLimits) -> int:
        if self.device.type == "cpu":
            return int(memory.available_cpu_bytes() * _CPU_MEMORY_SHARE)
        # The largest pass runs in a cache just large enough for it; its peak is then set aside.
        tokens = limits.max_prefill_tokens
        self._use_table(RowTable(1, tokens + 2, shape.block_size))
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            self._backend.allocate(shape, tokens // shape.block_size + 2, self.device)
            self._rehearse(tokens, tokens + 2)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"Not enough memory to handle {tokens} prefill tokens. "
                "You need to decrease `--max-batch-prefill-tokens`"
            ) from error
        available = memory.available_cuda_bytes(self.device, self._config.cuda_memory_fraction)
        # What that pass did not do: gather the blocks of a decode, sample for all rows.
        gathered = (
            2 * MAX_GATHER_TOKENS * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        )
        sampled = _SAMPLING_BYTES * limits.max_batch_size * self.model_config.vocab_size
        return max(0, available - gathered - sampled)

    def _synchronize(self) -> None:
        """So that forward_ns is device time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _device(name: str | None) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ModelError("--device cuda was asked for, but torch finds no CUDA device; use cpu")
    return torch.device(name or ("cuda" if has_cuda else "cpu"))


def _dtype(name: str | None, checkpoint: str, device: torch.device) -> torch.dtype:
    """As asked for; else float32 on cpu, as TGI, and the checkpoint's own type on cuda."""
    if name is not None:
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" else DTYPES.get(checkpoint, torch.float16)


def _add_top_tokens(result: StepResult, requests: Sequence[RowRequest], choice: Choice) -> None:
    if not any(item.top_n_tokens for item in requests):
        return
    for row, item in enumerate(requests):
        ids, logprobs = (
            top_tokens(choice, row, item.top_n_tokens) if item.top_n_tokens else ([], [])
        )
        result.top_token_counts.append(len(ids))
        result.top_token_ids += ids
        result.top_token_logprobs += logprobs
