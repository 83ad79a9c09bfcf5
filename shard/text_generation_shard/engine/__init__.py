"""The one owner of what runs: rows, steps, endings."""
