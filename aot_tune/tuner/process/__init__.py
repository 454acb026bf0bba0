"""A child process that answers calls, reports progress and can be killed."""
