"""Searches that libraries make on their first call, as data: which search it was, and what won it."""
