"""Declaration of a kernel: class, checks, discovery, source hash. Imports no tables and no launch code."""
