"""Tables of tuned configs: finding, reading and writing them, and the rule between measured sizes."""
