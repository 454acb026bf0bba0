"""Matrix products of 8-bit floats."""
