"""`aot-tune report`: tables as one page of pictures."""
