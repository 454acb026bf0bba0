"""Time the kernels beside other implementations, or check their results."""
