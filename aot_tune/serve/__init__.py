"""The serve side: load tables, resolve problems to configs, launch. Small, fast; never imports the tuner."""
