"""Time the kernels against other implementations, or check their results."""
