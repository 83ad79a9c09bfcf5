"""Any decoder of transformers: its modules, our attention, cache and products."""
