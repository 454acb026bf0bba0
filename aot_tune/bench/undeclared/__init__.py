"""Problems that nobody declared, and the regret of the chosen configs at them."""
