"""What a kernel is timed beside."""
