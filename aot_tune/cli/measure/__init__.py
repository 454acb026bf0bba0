"""Verbs that measure tables and configs which are there: verify, profile."""
