"""Anthropic's POST /v1/messages."""
