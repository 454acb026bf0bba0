"""Turn times into a table: the portfolio, the winners, ties with the incumbent."""
