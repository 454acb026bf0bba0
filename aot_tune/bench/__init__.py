"""Measure the project's claims about speed on this machine's GPU. README.md describes each section."""
