"""Serving: load tables, choose configs, launch kernels. It is small and fast, and never imports the tuner."""
