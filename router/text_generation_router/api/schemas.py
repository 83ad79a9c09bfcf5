"""TGI's JSON bodies, for parsing (requests) and for the documentation (responses)."""

import struct
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from text_generation_router.api.bounded import Entries, Items
from text_generation_router.request import Grammar
from text_generation_router.validation import GenerateParameters


def to_float32(value: float) -> float:
    """The nearest 32-bit float, which is what the shard computes with."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        raise ValueError("must fit in a 32-bit float") from None
    assert isinstance(rounded, float)
    return rounded


def _to_token_ids(biases: dict[str, float]) -> dict[str, float]:
    """JSON keys are strings; these must be written like integers."""
    for key in biases:
        # Longer ones are no ids, and take long to read.
        if not (len(key) < 20 and key.isascii() and key.isdecimal() and key == str(int(key))):
            raise ValueError(f'keys must be token ids such as "42", not {key[:20]!r}')
    return biases


Float32 = Annotated[float, AfterValidator(to_float32)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Uint32 = Annotated[int, Field(ge=0, lt=2**32)]
Uint64 = Annotated[int, Field(ge=0, lt=2**64)]
CacheSalt = Annotated[
    str,
    Field(
        min_length=1,
        max_length=256,
        description="Only prompts of the same salt share what is computed of them.",
    ),
]
LogitBias = Annotated[Entries[Float32], AfterValidator(_to_token_ids)]


class Body(BaseModel):
    """Types are taken literally: 1 is a number, "1" is not. Unknown fields are not read."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


JsonSchema = dict[str, Any]
_ANY_OBJECT: JsonSchema = {"type": "object"}


class JsonGrammarBody(Body):
    """A JSON schema, or a string that holds one."""

    type: Literal["json", "json_object"]
    value: JsonSchema | str = Field(examples=[{"properties": {"name": {"type": "string"}}}])

    def to_grammar(self) -> Grammar:
        """The same without pydantic."""
        return _schema_grammar(self.value)


class NamedSchemaBody(Body):
    """A JSON schema as OpenAI wraps it; its name and `strict` change nothing: it always holds."""

    schema_: JsonSchema = Field(alias="schema", examples=[{"type": "object"}])
    name: str | None = None


class SchemaGrammarBody(Body):
    """A JSON schema in TGI's place (`value`) or in OpenAI's (`json_schema`)."""

    type: Literal["json_schema"]
    value: NamedSchemaBody | None = None
    json_schema: NamedSchemaBody | None = None

    @model_validator(mode="after")
    def _check_one_is_given(self) -> Self:
        if (self.value is None) == (self.json_schema is None):
            raise ValueError("one of `json_schema` and `value` must be given")
        return self

    def to_grammar(self) -> Grammar:
        """The same without pydantic."""
        given = self.value or self.json_schema
        assert given is not None
        return _schema_grammar(given.schema_)


class WrittenGrammarBody(Body):
    """A regular expression that the whole text matches, or a grammar in llguidance's Lark."""

    type: Literal["regex", "lark"]
    value: str = Field(examples=["[0-9]{3}-[a-z]+"])

    def to_grammar(self) -> Grammar:
        """The same without pydantic."""
        return Grammar(self.type, self.value)


class TextFormatBody(Body):
    """Any text."""

    type: Literal["text"]

    def to_grammar(self) -> None:
        """There is none."""


class JsonFormatBody(Body):
    """Any JSON object, or one that follows a schema, in TGI's spelling or in LangChain's."""

    type: Literal["json_object", "json"]
    value: JsonSchema | str | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")

    def to_grammar(self) -> Grammar:
        """The same without pydantic."""
        given = self.schema_ if self.value is None else self.value
        return _schema_grammar(_ANY_OBJECT if given is None else given)


GrammarBody = Annotated[
    JsonGrammarBody | SchemaGrammarBody | WrittenGrammarBody, Field(discriminator="type")
]
# `response_format` of OpenAI's routes: `None` or its `to_grammar()` is the request's grammar.
ResponseFormatBody = Annotated[
    TextFormatBody | JsonFormatBody | SchemaGrammarBody | WrittenGrammarBody,
    Field(discriminator="type"),
]


def _schema_grammar(schema: JsonSchema | str) -> Grammar:
    source = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    return Grammar("json_schema", source)


class GenerateParametersBody(Body):
    """How to generate. Fields that TGI does not have are the last six."""

    best_of: Uint64 | None = Field(
        default=None, description="Generations to choose from.", examples=[1]
    )
    temperature: Float32 | None = Field(default=None, examples=[0.5])
    repetition_penalty: Float32 | None = Field(
        default=None, description="1.0: none.", examples=[1.03]
    )
    frequency_penalty: Float32 | None = Field(
        default=None, description="-2.0 to 2.0.", examples=[0.1]
    )
    top_k: Int32 | None = Field(default=None, examples=[10])
    top_p: Float32 | None = Field(default=None, description="Between 0 and 1.", examples=[0.95])
    typical_p: Float32 | None = Field(default=None, description="Between 0 and 1.", examples=[0.95])
    do_sample: bool = Field(
        default=False, description="Draw tokens. True if `parameters` is left out.", examples=[True]
    )
    max_new_tokens: Uint32 | None = Field(
        default=None, description="Default: as many as fit after the prompt.", examples=[20]
    )
    return_full_text: bool | None = Field(
        default=None, description="Put the prompt before the generated text.", examples=[False]
    )
    stop: Items[str] = Field(
        default=[], description="Generation stops after any of these.", examples=[["photographer"]]
    )
    truncate: Uint64 | None = Field(
        default=None, description="Keep so many last tokens of the prompt."
    )
    watermark: bool = Field(default=False, examples=[True])
    details: bool = Field(default=False, description="Return the tokens.")
    decoder_input_details: bool = Field(
        default=False, description="Return the tokens of the prompt; not when streaming."
    )
    seed: Uint64 | None = Field(default=None, description="Default: random.")
    top_n_tokens: Uint32 | None = Field(
        default=None, description="Return so many best tokens at each step.", examples=[5]
    )
    grammar: GrammarBody | None = Field(
        default=None, description="What the generated text must look like."
    )
    adapter_id: str | None = Field(default=None, description="Not supported.")
    presence_penalty: Float32 | None = Field(
        default=None, description="-2.0 to 2.0.", examples=[0.1]
    )
    logit_bias: LogitBias | None = Field(
        default=None, description="Token id to what is added to its logit, -100 to 100."
    )
    ignore_eos_token: bool = Field(
        default=False, description="Go on after an end-of-sequence token."
    )
    min_new_tokens: Uint32 | None = Field(default=None, description="No end before so many tokens.")
    deterministic: bool = Field(
        default=False,
        description="The same tokens in whatever company, bit for bit; refused where that can not "
        "be kept.",
    )
    cache_salt: CacheSalt | None = None


class GenerateRequest(Body):
    """Body of /generate, /generate_stream and /tokenize."""

    inputs: str = Field(examples=["My name is Olivier and I"])
    # TGI: without `parameters` tokens are drawn, with `{}` the best ones are taken.
    parameters: GenerateParametersBody = Field(
        default_factory=lambda: GenerateParametersBody(do_sample=True)
    )

    def to_parameters(self, return_full_text: bool = False) -> GenerateParameters:
        """The same without pydantic; `return_full_text` is what its absence means."""
        # Those that a protocol adds to them are read by its own route.
        names = GenerateParametersBody.model_fields
        given = {name: getattr(self.parameters, name) for name in names}
        if given["return_full_text"] is None:
            given["return_full_text"] = return_full_text
        given["stop"] = tuple(self.parameters.stop)
        grammar = self.parameters.grammar
        given["grammar"] = None if grammar is None else grammar.to_grammar()
        given["logit_bias"] = tuple(
            (int(key), bias) for key, bias in (self.parameters.logit_bias or {}).items()
        )
        return GenerateParameters(inputs=self.inputs, **given)


class CompatGenerateRequest(GenerateRequest):
    """Body of POST /."""

    stream: bool = False


class PrefillTokenBody(BaseModel):
    """One token of the prompt."""

    id: int
    text: str
    logprob: float | None


class TokenBody(PrefillTokenBody):
    """One generated token."""

    special: bool


class SequenceBody(BaseModel):
    """What is told about a generation with `details`."""

    finish_reason: str = Field(examples=["length", "eos_token", "stop_sequence"])
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillTokenBody]
    tokens: list[TokenBody]
    top_tokens: list[list[TokenBody]] = Field(default=[], description="Left out when empty.")


class BestOfSequenceBody(SequenceBody):
    """A generation that did not win."""

    generated_text: str


class DetailsBody(SequenceBody):
    """Details of the answer, and the generations it won against."""

    best_of_sequences: list[BestOfSequenceBody] = Field(
        default=[], description="Left out when empty."
    )


class GenerateResponse(BaseModel):
    """Answer of /generate."""

    generated_text: str
    details: DetailsBody | None = Field(default=None, description="Left out unless asked for.")


class StreamDetailsBody(BaseModel):
    """Details of a stream."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(BaseModel):
    """One event of /generate_stream."""

    index: int
    token: TokenBody
    top_tokens: list[TokenBody] = Field(default=[], description="Left out when empty.")
    generated_text: str | None = Field(description="Only in the last event.")
    details: StreamDetailsBody | None = Field(description="Only in the last event, if asked for.")


class TokenizedToken(BaseModel):
    """One token of /tokenize; `start` and `stop` are byte offsets into the input."""

    id: int
    text: str
    start: int
    stop: int


class ErrorResponse(BaseModel):
    """Body of every error."""

    error: str
    error_type: str


class InfoResponse(BaseModel):
    """What this server is and allows. Fields that TGI does not have are the last ones."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    max_batch_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_size: int
    waiting_served_ratio: float
    max_waiting_tokens: int
    model_dtype: str
    model_device_type: str
    model_vocab_size: int
    num_shard: int
    block_size: int
    num_blocks: int
    attention_impl: str
    features: dict[str, str] = Field(
        description="What is on and what is off, and why.",
        examples=[{"prefix_caching": "on", "speculation": "off: start with --speculate N"}],
    )
