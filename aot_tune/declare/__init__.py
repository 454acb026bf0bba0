"""What an author declares of a kernel, and what is checked of it. Knows no table and no launch."""
