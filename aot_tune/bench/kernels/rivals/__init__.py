"""Other implementations that the kernels are timed beside, by family."""
