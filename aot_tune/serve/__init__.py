"""The serve side: load tables, resolve a problem to a config, launch. Small and fast; never imports the tuner."""
