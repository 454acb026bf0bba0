"""A child process that answers requests, reports progress and can be killed."""
