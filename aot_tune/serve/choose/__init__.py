"""Choose the config of a problem: load the tables, try the steps in order."""
