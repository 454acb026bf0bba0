"""A whole sweep, kernel by kernel, with its journal, progress and report; or a prediction without a GPU."""
