"""The processor, by kernels of its own."""
