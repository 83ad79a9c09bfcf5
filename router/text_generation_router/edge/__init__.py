"""What protects the server without a proxy: connections, bodies, admission of requests, keys."""
