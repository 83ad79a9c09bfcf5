"""From scores to tokens."""
