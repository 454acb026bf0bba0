"""Measuring and compiling on the nodes of a Ray cluster. Only `cluster` imports Ray."""
