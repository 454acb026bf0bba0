"""Record the searches of libraries, so that other processes replay them."""
