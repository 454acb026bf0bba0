"""Tile code that kernels over rows share."""
