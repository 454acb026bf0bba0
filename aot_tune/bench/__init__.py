"""Measure what the project states about speed, on this machine's GPU. README.md describes each section."""
