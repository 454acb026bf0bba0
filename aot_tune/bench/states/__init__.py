"""Times in each state of the GPU, of configs whole and with a stage left out."""
