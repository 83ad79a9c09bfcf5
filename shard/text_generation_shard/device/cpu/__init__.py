"""The CPU, with our compiled kernels."""
