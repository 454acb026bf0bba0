"""Source hash: a kernel's code, followed through helpers, globals and closures."""
