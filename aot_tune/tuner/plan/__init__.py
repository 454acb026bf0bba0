"""Planning a sweep: the candidates of each problem, the model that ranks them, the shortlist to measure."""
