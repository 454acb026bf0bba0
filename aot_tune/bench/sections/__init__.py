"""The sections of `make bench`."""
