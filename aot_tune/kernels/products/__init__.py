"""Matrix products: dense, grouped by expert, gated, and of 8-bit floats."""
