"""Plain torch on any device: what the others are tested against."""
