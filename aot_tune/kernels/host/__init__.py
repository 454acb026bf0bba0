"""Checks of arguments, tests for shared memory and padding, for all host functions. Holds no tile code."""
