"""Attention over whole prompts."""
