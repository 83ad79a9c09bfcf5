"""How the embedded model is made: README.md."""
