"""Tables of tuned configs: finding, reading and writing them, and the rule inside a bucket."""
