"""Choose the config of a problem: load the tables, find the entry, try the steps in order."""
