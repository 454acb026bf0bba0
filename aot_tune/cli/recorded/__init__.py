"""Recorded tables in the verbs of the command line: found, shown, checked, compared, explained."""
