"""Other implementations that the kernels are timed against, by family."""
