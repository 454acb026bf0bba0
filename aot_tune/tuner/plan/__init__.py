"""Plan a sweep: candidates, the model that ranks them, the shortlist to measure."""
