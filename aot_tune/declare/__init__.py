"""A kernel's declaration: its class, its checks, discovery, the source hash. Knows no table or launch."""
