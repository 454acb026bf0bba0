"""Processes that sections of the bench start and command: each is run by ``python -m``."""
