"""Tables of tuned configs: finding, reading, writing and checking them; the states of their times."""
