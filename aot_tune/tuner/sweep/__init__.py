"""A whole sweep: kernel by kernel, journal, progress, report; or a prediction without a GPU."""
