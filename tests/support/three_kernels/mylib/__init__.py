"""Three kernels in the style of cuTile's documentation: tuned on the first call of a shape."""
