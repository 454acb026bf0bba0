"""Sweep kernels with journal, progress and report; or predict without a GPU."""
