"""The layers of models."""
