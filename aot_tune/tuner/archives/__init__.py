"""Archives of cubins: what to compile for the tables, building it, checking it."""
