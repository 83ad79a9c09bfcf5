"""The model server: weights, KV blocks, rows, sampling."""
