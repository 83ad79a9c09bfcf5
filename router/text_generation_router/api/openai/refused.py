"""Fields that ask for what this server can not do: named, so that they are not passed over."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field


def refuses(*harmless: Any, sentence: str = "not supported; leave it out") -> AfterValidator:
    """For a field that is not supported: null and `harmless`, which ask for nothing, may come."""

    def check(value: Any) -> None:
        if value is not None and value not in harmless:
            raise ValueError(sentence)

    return AfterValidator(check)


NOT_SUPPORTED = Field(description="Not supported.")
Refused = Annotated[Any, refuses(), NOT_SUPPORTED]
