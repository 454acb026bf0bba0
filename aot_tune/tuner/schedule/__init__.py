"""Schedule a sweep: the next task of each GPU, and the start of the next kernel."""
