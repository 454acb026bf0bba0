"""The source hash: what a kernel computes, followed through helpers, globals and closures."""
