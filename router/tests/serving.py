"""A whole router on a real port, on top of shards that write a scripted text."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from text_generation_router.app import create_app, create_refusal
from text_generation_router.certificate import Certificate
from text_generation_router.chat.workers import TemplateWorkers
from text_generation_router.client.translate import ShardInfo, WarmupResult
from text_generation_router.config import RouterConfig
from text_generation_router.connection import ConnectionLimits
from text_generation_router.errors import GenerationError
from text_generation_router.front import Front
from text_generation_router.request import FinishReason
from text_generation_router.scheduler.entry import Entry
from text_generation_router.scheduler.shards import Advance, CachedBatch, GrammarResult, StepResult
from text_generation_router.server import bind, server_config
from text_generation_router.services import Services, assemble, load_template
from text_generation_router.tokenizer import Tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

# What `usage` of OpenAI's routes says where nothing was cached and the model did not reason.
PLAIN_USAGE = {
    "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
        "audio_tokens": 0,
    },
}
PATIENCE_S = 60.0
"""For an answer that does not come; only a failing test waits so long."""
BOS_ID, EOS_ID = 256, 257
VOCAB_SIZE = 258
BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_tokenizer(directory: Path, words: Sequence[str] = ()) -> None:
    """One token per byte, `<s>` in front; ids of bytes are indices in the sorted alphabet. After
    them, the words are tokens, too."""
    vocabulary = {character: place for place, character in enumerate(BYTE_ALPHABET)}
    tokenizer = FastTokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(list(words))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS_ID)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def pooled(input_ids: Sequence[int], width: int) -> bytes:
    """The fake vector of a prompt: its number of tokens, the first, the last, and threes."""
    numbers = [len(input_ids), input_ids[0], input_ids[-1], *[3] * (width - 3)]
    return struct.pack(f"<{width}f", *numbers)


def token_scores(input_ids: Sequence[int]) -> tuple[float, float]:
    """A shorter prompt answers rather with yes."""
    return -0.01 * len(input_ids), -1.0


class ScriptedShards:
    """Writes `script` (token ids) over and over until `max_new_tokens`; logprob −0.1 × place."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.delay_s = 0.0
        self.failure: GenerationError | None = None
        self.is_stuck = False
        self.grammars: list[str] = []
        self.min_tokens = 1
        # Numbers of a hidden state.
        self.width = 4
        self.rows: dict[int, int] = {}
        self._entries: dict[int, Entry] = {}
        self._batches: dict[int, list[int]] = {}

    async def prefill(
        self,
        batch_id: int,
        entries: Sequence[Entry],
        cached_batch_id: int | None,
        advance: Advance | None = None,
    ) -> StepResult:
        await self._pause()
        for entry in entries:
            self.rows[entry.id] = len(entry.token_ids)
            self._entries[entry.id] = entry
        ids = [entry.id for entry in entries]
        cached = [] if cached_batch_id is None else self._batches.pop(cached_batch_id)
        kept = batch_id if cached_batch_id is None else cached_batch_id
        result = self._step(kept, [*cached, *ids], [])
        prompts = {
            entry.id: [float("nan"), *(-0.25 for _ in entry.request.input_ids[1:])]
            for entry in entries
            if entry.request.prefill_logprobs
        }
        tops: dict[int, tuple[list[int], list[float]]] = {}
        for entry in entries:
            count = entry.request.top_n_tokens
            if entry.id in prompts and count:
                places = len(entry.request.input_ids) - 1
                tops[entry.id] = [*range(count)] * places, [-0.5] * count * places
        ranks = {key: [*range(1, len(values))] for key, values in prompts.items()}
        return replace(
            result,
            prefill_logprobs=prompts,
            prefill_ranks=ranks,
            prefill_top_tokens=tops,
            pooled_prompts={
                entry.id: pooled(entry.request.input_ids, self.width)
                for entry in entries
                if entry.request.pooling is not None
            },
            token_scores={
                entry.id: token_scores(entry.request.input_ids)
                for entry in entries
                if entry.request.score_token_ids
            },
        )

    async def decode(self, batch_ids: Sequence[int], advance: Advance) -> StepResult:
        await self._pause()
        ids = [request_id for batch_id in batch_ids for request_id in self._batches.pop(batch_id)]
        return self._step(batch_ids[0], ids, [])

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        for request_id in set(self._batches[batch_id]) - set(request_ids):
            del self.rows[request_id]
        self._batches[batch_id] = list(request_ids)
        return CachedBatch(batch_id, tuple(request_ids))

    async def clear_cache(self, batch_id: int | None) -> None:
        for known in list(self._batches) if batch_id is None else [batch_id]:
            for request_id in self._batches.pop(known, []):
                del self.rows[request_id]

    async def compile_grammar(self, grammar: str, timeout_s: float) -> GrammarResult:
        """Takes every grammar, and writes the script all the same."""
        self.grammars.append(grammar)
        return GrammarResult(min_tokens=self.min_tokens)

    async def health(self) -> None:
        if self.is_stuck:
            await asyncio.sleep(3600)
        if self.failure is not None:
            raise self.failure

    async def _pause(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure

    def _step(self, batch_id: int, ids: list[int], others: list[int]) -> StepResult:
        tokens, logprobs, reasons, top_counts, top_ids, running = [], [], [], [], [], []
        for request_id in ids:
            place = self.rows[request_id]
            request = self._entries[request_id].request
            tokens.append(self.script[place % len(self.script)])
            logprobs.append(-0.1 * (place + 1))
            self.rows[request_id] = place + 1
            is_end = place + 1 >= request.stopping.max_new_tokens
            reason = FinishReason.LENGTH if is_end else None
            if tokens[-1] == EOS_ID and not request.stopping.ignore_eos_token:
                reason = FinishReason.EOS_TOKEN
            elif tokens[-1] in request.stopping.stop_token_ids:
                reason = FinishReason.STOP_TOKEN
            reasons.append(reason)
            top_counts.append(request.top_n_tokens)
            top_ids += range(request.top_n_tokens)
            if reason is None:
                running.append(request_id)
            else:
                del self.rows[request_id]
        batch = None
        if others or running:
            self._batches[batch_id] = [*others, *running]
            batch = CachedBatch(batch_id, tuple(self._batches[batch_id]))
        top = (top_counts, top_ids, [-0.5] * len(top_ids)) if top_ids else ((), (), ())
        return StepResult(ids, tokens, logprobs, reasons, batch, (), *top)


@dataclass(frozen=True, slots=True)
class Server:
    """A running router and a client for it."""

    services: Services
    shards: ScriptedShards
    client: httpx.AsyncClient
    port: int

    async def settle(self) -> None:
        """Waits until nothing runs, then asserts that nothing was lost."""
        for _ in range(200):
            if self.services.infer.free_permits == self.services.config.max_concurrent_requests:
                break
            await asyncio.sleep(0.01)
        assert self.services.infer.free_permits == self.services.config.max_concurrent_requests
        for _ in range(200):
            if not self.shards.rows:
                break
            await asyncio.sleep(0.01)
        assert not self.shards.rows
        self.services.batcher.integrity()
        assert self.services.metrics.kv_blocks_used.value == 0


def script_of(text: str) -> list[int]:
    """The byte ids of a text."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (pair,) = spelled.pre_tokenize_str(text)
    return [BYTE_ALPHABET.index(character) for character in pair[0]]


def assemble_scripted(directory: Path, text: str = "hello ", **options: Any) -> Services:
    """Services on top of shards that write `text`; puts a tokenizer into `directory`."""
    words = ("yes", "no") if options.get("reranker") else ()
    write_tokenizer(directory, words)
    config = RouterConfig(tokenizer_name=str(directory), **options)
    shards = ScriptedShards(script_of(text))
    info = ShardInfo(
        dtype="float32",
        device_type="cpu",
        block_size=16,
        attention_impl="fake",
        vocab_size=VOCAB_SIZE + len(words),
        max_model_len=4096,
        version="0",
        rank=0,
        world_size=1,
        hidden_size=4,
    )
    warmup = WarmupResult(
        num_blocks=1024,
        max_input_tokens=config.max_input_tokens or 4095,
        max_total_tokens=config.max_total_tokens or 4096,
        kv_cache_bytes=0,
        weights_bytes=0,
    )
    tokenizer = Tokenizer.load(directory)
    workers = TemplateWorkers(load_template(config, tokenizer))
    return assemble(config, shards, tokenizer, info, warmup, workers)


@asynccontextmanager
async def serve(
    directory: Path,
    text: str = "hello ",
    limits: ConnectionLimits | None = None,
    certificate: Certificate | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """Runs the router in this event loop, and checks at the end that nothing was lost."""
    services = assemble_scripted(directory, text, **options)
    app = create_app(services.config, services)
    front = Front(app, create_refusal(services.config))
    config = server_config(front, services, limits, certificate)
    config.load()
    server = uvicorn.Server(config)
    # What `Server.serve` does, without its signal handlers and its sleeps.
    server.lifespan = config.lifespan_class(config)
    with bind("127.0.0.1", 0) as listener:
        # Small, so that a client that does not read is noticed soon.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        port = listener.getsockname()[1]
        await server.startup(sockets=[listener.dup()])
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, verify=False, timeout=PATIENCE_S) as client:
            assert isinstance(services.shards, ScriptedShards)
            running = Server(services, services.shards, client, port)
            yield running
            await running.settle()
    finally:
        for listening in server.servers:
            listening.close()
        await server.lifespan.shutdown()
        services.tokenizer.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        services.templates.close()
        await asyncio.sleep(0)
