"""Prebuilt machine code in one file an arch: its format, what it was compiled from, which sizes share it."""
