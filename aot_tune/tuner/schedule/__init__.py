"""What a sweep does next: which task a GPU draws, and when the next kernel begins."""
