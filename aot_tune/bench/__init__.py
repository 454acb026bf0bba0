"""`make bench`: what aot_tune promises, measured side by side in one run on this machine's GPU. Not used by the rest."""
