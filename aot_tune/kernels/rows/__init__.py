"""Tile code that the kernels over rows share: norms, softmax, cross entropy and the elementwise ones."""
