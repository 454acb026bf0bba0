"""Measure on a GPU from the parent's side: run configs, blame faults, retry."""
