"""Searches of libraries, recorded once and replayed from tables."""
