"""Record the searches that a library makes, so that other processes replay them."""
