"""Profiles: what bounds a launch, by code, times and counters, and which change of config addresses it."""
