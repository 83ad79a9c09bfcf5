"""What texts a grammar describes, as far as their ends are concerned; see `places`."""
