"""A model's files: brought, read, and turned into tensors."""
