"""Search on a miss, in this process or in a child, and cache the winner."""
