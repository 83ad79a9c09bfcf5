"""TGI's JSON bodies, for parsing (requests) and for the documentation (responses)."""

from pydantic import BaseModel, ConfigDict, Field

from text_generation_router.api.fields import (
    DETERMINISTIC,
    STREAM,
    GrammarBody,
    grammar_of,
)
from text_generation_router.fields import (
    Body,
    CacheSalt,
    Items,
    LogitBias,
    Uint32,
    Uint64,
    optional,
    with_numbers_of_tgi,
)
from text_generation_router.validation import GenerateParameters


@with_numbers_of_tgi
class GenerateParametersBody(Body):
    """How to generate. The fields after `adapter_id` are not in TGI."""

    best_of: Uint64 | None = optional(
        "Generate this many texts, and return the one whose tokens are the likeliest.", examples=[1]
    )
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = optional(
        "Draw tokens at random, instead of the likeliest one. True if `parameters` is left out.",
        default=False,
        examples=[True],
    )
    max_new_tokens: Uint32 | None = optional(
        "The most tokens to generate. Default: as many as fit after the prompt.", examples=[20]
    )
    return_full_text: bool | None = optional(
        "Put the prompt before the generated text.", examples=[False]
    )
    stop: Items[str] = optional(
        "Generation stops after any of these.", default=[], examples=[["photographer"]]
    )
    truncate: Uint64 | None = optional("Keep only this many of the prompt's last tokens.")
    watermark: bool = optional(
        "Mark the text, so that a detector can tell that a model wrote it.",
        default=False,
        examples=[True],
    )
    details: bool = optional("Return the generated tokens, too.", default=False)
    decoder_input_details: bool = optional(
        "Return the prompt's tokens, too. Not for a stream.", default=False
    )
    seed: Uint64 | None = optional("The same seed draws the same tokens. Default: random.")
    top_n_tokens: Uint32 | None = optional(
        "Return this many of the likeliest tokens at each step.", examples=[5]
    )
    grammar: GrammarBody | None = optional("The form that the generated text must have.")
    adapter_id: str | None = optional("Not supported.")
    presence_penalty: float | None = None
    logit_bias: LogitBias | None = optional(
        "Token id, and what is added to its logit: -100 to 100."
    )
    ignore_eos_token: bool = optional("Go on after an end-of-sequence token.", default=False)
    min_new_tokens: Uint32 | None = optional(
        "The text does not end before it has this many tokens."
    )
    deterministic: bool = optional(DETERMINISTIC, default=False)
    cache_salt: CacheSalt | None = None


class GenerateRequest(Body):
    """Body of /generate, /generate_stream and /tokenize."""

    inputs: str = Field(description="The prompt.", examples=["My name is Olivier and I"])
    # TGI: without `parameters` tokens are drawn, with `{}` the best ones are taken.
    parameters: GenerateParametersBody = Field(
        default_factory=lambda: GenerateParametersBody(do_sample=True),
        description="How to generate. /tokenize does not read it.",
    )

    def to_parameters(self, return_full_text: bool = False) -> GenerateParameters:
        """The same without pydantic; `return_full_text` is what its absence means."""
        # Those that a protocol adds to them are read by its own route.
        names = GenerateParametersBody.model_fields
        given = {name: getattr(self.parameters, name) for name in names}
        if given["return_full_text"] is None:
            given["return_full_text"] = return_full_text
        given["stop"] = tuple(self.parameters.stop)
        given["grammar"] = grammar_of(self.parameters.grammar)
        return GenerateParameters.of(inputs=self.inputs, **given)


class CompatGenerateRequest(GenerateRequest):
    """Body of POST /."""

    stream: bool = optional(STREAM, default=False)


class PrefillTokenBody(BaseModel):
    """One token of the prompt."""

    id: int = Field(description="The number of the token in the vocabulary.")
    text: str
    logprob: float | None = Field(
        description="The log-probability of the token. The prompt's first token has none."
    )


class TokenBody(PrefillTokenBody):
    """One generated token."""

    special: bool = Field(
        description="Whether it is one of the model's special tokens, which are not part of the "
        "text."
    )


class SequenceBody(BaseModel):
    """The details of a generation."""

    finish_reason: str = Field(
        description="Why the text ended.", examples=["length", "eos_token", "stop_sequence"]
    )
    generated_tokens: int = Field(description="How many tokens were generated.")
    seed: int | None = Field(
        description="The seed that tokens were drawn with. null: none were drawn."
    )
    prefill: list[PrefillTokenBody] = Field(
        description="The prompt's tokens, if `decoder_input_details` was true."
    )
    tokens: list[TokenBody] = Field(description="The generated tokens.")
    top_tokens: list[list[TokenBody]] = optional(
        "For each generated token the likeliest ones. Left out when empty.", default=[]
    )


class BestOfSequenceBody(SequenceBody):
    """One of the generations that were not chosen."""

    generated_text: str = Field(description="Its text.")


class DetailsBody(SequenceBody):
    """Details of the answer, and the generations that were not chosen."""

    best_of_sequences: list[BestOfSequenceBody] = optional(
        "The other generations of `best_of`. Left out when empty.", default=[]
    )


class GenerateResponse(BaseModel):
    """Answer of /generate."""

    generated_text: str = Field(
        description="The text, with the prompt before it if that was asked for."
    )
    details: DetailsBody | None = optional("Left out unless asked for.")


class StreamDetailsBody(BaseModel):
    """Details of a stream."""

    finish_reason: str = Field(description="Why the text ended.")
    generated_tokens: int = Field(description="How many tokens were generated.")
    seed: int | None = Field(
        description="The seed that tokens were drawn with. null: none were drawn."
    )
    input_length: int = Field(description="Tokens of the prompt.")


class StreamResponse(BaseModel):
    """One event of /generate_stream."""

    index: int = Field(description="1 for the first token.")
    token: TokenBody = Field(description="The token that was generated.")
    top_tokens: list[TokenBody] = optional(
        "The likeliest tokens of this step. Left out when empty.", default=[]
    )
    generated_text: str | None = Field(description="The whole text. Only in the last event.")
    details: StreamDetailsBody | None = Field(description="Only in the last event, if asked for.")


class InfoResponse(BaseModel):
    """What this server is and allows. Fields that TGI does not have are the last ones."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: str = Field(description="The served model.")
    model_sha: str | None = Field(description="The revision of the model.")
    model_pipeline_tag: str | None = Field(description="Always null.")
    max_concurrent_requests: int = Field(
        description="The most requests that wait or run at one time; one more is answered with 429."
    )
    max_best_of: int = Field(description="The largest `best_of`.")
    max_stop_sequences: int = Field(description="The most stop sequences of one request.")
    max_input_tokens: int = Field(description="The longest prompt, in tokens.")
    max_total_tokens: int = Field(
        description="The most tokens of a prompt and its answer together."
    )
    validation_workers: int = Field(description="Threads that tokenize prompts.")
    max_client_batch_size: int = Field(
        description="The value of --max-client-batch-size; no request is limited by it."
    )
    router: str = Field(description="The program that answers.")
    version: str = Field(description="The version of that program.")
    sha: str | None = Field(description="Always null.")
    docker_label: str | None = Field(description="Always null.")
    max_batch_total_tokens: int = Field(
        description="The most tokens that all running requests may hold together."
    )
    max_batch_prefill_tokens: int = Field(description="The most tokens of prompts in one step.")
    max_batch_size: int = Field(description="The most requests that are computed at one time.")
    waiting_served_ratio: float = Field(
        description="Waiting requests join when there are this many times as many as running "
        "ones. Only without prefill chunking."
    )
    max_waiting_tokens: int = Field(
        description="Steps after which waiting requests join at any ratio. Only without prefill "
        "chunking."
    )
    model_dtype: str = Field(description="The number type that the model computes with.")
    model_device_type: str = Field(description="What the model runs on.")
    model_vocab_size: int = Field(description="Tokens in the vocabulary.")
    num_shard: int = Field(description="Processes that the model is divided over.")
    block_size: int = Field(description="Tokens in one block of the cache.")
    num_blocks: int = Field(description="Blocks in the cache.")
    attention_impl: str = Field(description="How attention is computed.")
    features: dict[str, str] = Field(
        description="What is on and what is off, and why.",
        examples=[{"prefix_caching": "on", "speculation": "off: start with --speculate N"}],
    )
