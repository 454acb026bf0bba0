"""Tables of tuned configs: finding, reading and writing them, their nearest entry, the rule between sizes."""
