"""Processes that sections of the bench start and control, each by ``python -m``."""
