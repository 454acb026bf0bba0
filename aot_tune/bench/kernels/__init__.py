"""Every kernel beside what else a user would pick."""
