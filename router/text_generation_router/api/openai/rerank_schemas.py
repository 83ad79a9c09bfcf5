"""The bodies of /score, in vLLM's form, and of /rerank, in that of Jina and Cohere or of TEI."""

from typing import Annotated, Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from text_generation_router.api.openai.vllm import TruncateTokens
from text_generation_router.fields import Body, CacheSalt, Items, Refused
from text_generation_router.prompts import MOST_PROMPTS


class DocumentBody(Body):
    """A document as an object."""

    text: str = Field(description="The text.")


Document = str | DocumentBody
_QUERY = "Where did the cat sit?"
_DOCUMENTS: list[Any] = ["The cat sat on the mat.", "It rained."]
_INSTRUCTION = Field(
    default=None,
    description="What makes a document a good one. Default: that it answers a web search query.",
)


def text_of(document: Document) -> str:
    """The document's text."""
    return document if isinstance(document, str) else document.text


def _check_number(given: Any) -> Any:
    if isinstance(given, list) and not 0 < len(given) <= MOST_PROMPTS:
        raise ValueError(f"must be 1 to {MOST_PROMPTS} texts, {len(given)} are given")
    return given


class ScoringBody(Body):
    """What all these bodies have in common."""

    model: str | None = Field(
        default=None, description="The served model, or `tgi`.", examples=["tgi"]
    )
    instruction: str | None = _INSTRUCTION
    truncate_prompt_tokens: TruncateTokens | None = Field(
        default=None,
        description="Cut the end of a document off where its prompt has more tokens; -1: than can "
        "be.",
    )
    cache_salt: CacheSalt | None = None


class ScoreRequest(ScoringBody):
    """Body of /score: pairs of texts; one text is paired with each of several."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"text_1": _QUERY, "text_2": _DOCUMENTS}}
    )

    text_1: str | Items[str] = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="The query, or one for each document. Also called `queries` and `data_1`.",
    )
    text_2: Document | Items[Document] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="The documents. Also called `documents`, `items` and `data_2`.",
    )
    use_activation: bool | None = Field(
        default=None,
        validation_alias=AliasChoices("use_activation", "activation", "softmax"),
        description="false: raw scores, the logit of yes less that of no. Default: true.",
    )

    _number = field_validator("text_1", "text_2")(_check_number)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Query and document of each score."""
        queries = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        given = self.text_2 if isinstance(self.text_2, list) else [self.text_2]
        if len(queries) == 1:
            queries = queries * len(given)
        return list(zip(queries, map(text_of, given), strict=True))

    @model_validator(mode="after")
    def _are_pairs(self) -> Self:
        first = len(self.text_1) if isinstance(self.text_1, list) else 1
        second = len(self.text_2) if isinstance(self.text_2, list) else 1
        if first not in (1, second):
            raise ValueError(
                "`text_1` must be one text, or as many as `text_2` has. Given: "
                f"{first} and {second}"
            )
        return self


class RerankRequest(ScoringBody):
    """Body of /rerank: `documents`, as Jina and Cohere have it, or `texts`, as TEI has it, which
    also decide the form of the answer."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"query": _QUERY, "documents": _DOCUMENTS, "top_n": 1}}
    )

    query: str = Field(description="The query.")
    documents: Items[Document] | None = Field(default=None, description="The documents.")
    texts: Items[str] | None = Field(default=None, description="TEI's name of `documents`.")
    top_n: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Return only this many of the best. 0 and default: all."
    )
    return_documents: bool | None = Field(
        default=None, description="Return the documents, too. Default: true."
    )
    use_activation: bool | None = Field(
        default=None, description="false: raw scores, the logit of yes less that of no."
    )
    raw_scores: bool | None = Field(default=None, description="TEI's: raw scores.")
    return_text: bool | None = Field(
        default=None, description="TEI's: return the texts, too. Default: false."
    )
    truncate: bool | None = Field(
        default=None, description="TEI's: cut the end of texts that are too long off."
    )
    truncation_direction: str | None = Field(default=None, description="TEI's: `right` only.")
    rank_fields: Refused = None
    max_chunks_per_doc: Refused = None
    max_tokens_per_doc: Refused = None

    _number = field_validator("documents", "texts")(_check_number)

    @field_validator("truncation_direction")
    @classmethod
    def _from_the_end(cls, given: str | None) -> str | None:
        if given is not None and given.lower() != "right":
            raise ValueError("only `right` is supported: the end of a text is cut off")
        return given

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.documents is None) == (self.texts is None):
            raise ValueError("either `documents` or `texts` must be given, and not both")
        return self

    @property
    def given(self) -> list[str]:
        """The texts of the documents."""
        return [text_of(one) for one in self.documents or ()] or list(self.texts or ())


class ScoreBody(BaseModel):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float = Field(description="How well the document answers its query.")


class ScoringUsageBody(BaseModel):
    """Tokens of all prompts."""

    prompt_tokens: int = Field(description="Tokens of all the texts.")
    total_tokens: int = Field(description="The same.")


class ScoreListBody(BaseModel):
    """The scores in the order of the pairs."""

    id: str
    object: str = "list"
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str
    data: list[ScoreBody] = Field(description="One score for each pair.")
    usage: ScoringUsageBody = Field(description="How many tokens it took.")


class RankedDocumentBody(BaseModel):
    """The text of a document."""

    text: str


class RankedBody(BaseModel):
    """A document's place in the request, and its score."""

    index: int
    document: RankedDocumentBody | None = Field(default=None, description="The document.")
    relevance_score: float = Field(description="How well it answers the query.")


class RerankBody(BaseModel):
    """The documents, the best first."""

    id: str
    model: str
    usage: ScoringUsageBody = Field(description="How many tokens it took.")
    results: list[RankedBody] = Field(description="The documents, the best first.")


class RankedTextBody(BaseModel):
    """A text's place in the request, and its score, as TEI tells it: in a list, the best first."""

    index: int
    score: float = Field(description="How well it answers the query.")
    text: str | None = None
