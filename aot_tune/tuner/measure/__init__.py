"""Measuring on a GPU from the parent's side: which config runs, which is blamed, what is tried again."""
