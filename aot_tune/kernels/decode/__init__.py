"""Attention for one new token a sequence over a paged cache."""
