"""What hardware there is, and how a model is computed on it."""
