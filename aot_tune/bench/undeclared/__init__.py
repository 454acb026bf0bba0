"""Problems that nobody declared, and what the choice of a config leaves at them."""
