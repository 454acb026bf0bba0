"""Measure and compile on the nodes of a Ray cluster. Only `cluster` imports Ray."""
