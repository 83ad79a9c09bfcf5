"""Chat: templates render messages to a prompt; a parser turns the answer into events."""
