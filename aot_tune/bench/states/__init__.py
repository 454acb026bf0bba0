"""Explain why configs are slow in some states of the GPU: times in each, whole and with a stage left out."""
