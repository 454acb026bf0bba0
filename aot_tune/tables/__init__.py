"""Tables of tuned configs: reading, writing, where they lie, and the rule inside a bucket."""
