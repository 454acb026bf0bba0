"""Files of tables and journals, of two kinds each, in one form for the verbs."""
