"""Softmax, and the loss on it."""
