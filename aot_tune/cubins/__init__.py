"""Prebuilt cubins, one file for each arch: the format, what they were compiled from, which sizes share it."""
