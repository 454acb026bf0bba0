"""A miss: the live search, in this process or in a child, and the cache that remembers it."""
