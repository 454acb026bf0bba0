"""Serving: load tables, choose configs, launch kernels. Small, fast, and never imports the tuner."""
