"""Chats: the prompt that a template makes of messages, and the events read from the answer."""
