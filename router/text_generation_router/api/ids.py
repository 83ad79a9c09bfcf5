"""Ids of answers and of their parts."""

import uuid


def make_id(prefix: str) -> str:
    """A new id as OpenAI and Anthropic make them, such as msg_0f…"""
    return f"{prefix}_{uuid.uuid4().hex}"
