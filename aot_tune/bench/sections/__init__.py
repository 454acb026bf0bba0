"""Sections of the bench: each module measures one thing and has ``run(request)``."""
