"""Attention over whole prompts, of one length or packed."""
