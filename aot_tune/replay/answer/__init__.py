"""Replay recorded libraries: answer searches from tables, and launches from archives."""
