"""From times to a table: portfolio, winners, ties with the incumbent."""
