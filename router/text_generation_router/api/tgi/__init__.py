"""TGI's own routes: generation, tokens, and what the server says of itself."""
