"""What a kernel's source says: what it does to its arguments, and how its tiles lie in them."""
