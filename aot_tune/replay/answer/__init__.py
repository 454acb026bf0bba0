"""Replay what was recorded of a library: its searches answered from tables, its launches from archives."""
