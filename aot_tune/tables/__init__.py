"""Tables of tuned configs: find, read, write and check them; the states of their times."""
