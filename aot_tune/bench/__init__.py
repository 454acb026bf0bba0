"""`make bench`: what aot_tune promises, side by side in one run on this machine's GPU."""
