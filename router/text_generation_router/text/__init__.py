"""Text: tokens and back, with long texts in a process of their own."""
