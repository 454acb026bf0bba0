"""Prebuilt cubins, one file for each arch: the format, their origin, the sizes that share a cubin."""
