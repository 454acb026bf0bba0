"""Command line. Beside bench the only room that prints."""
