"""Norms over rows."""
