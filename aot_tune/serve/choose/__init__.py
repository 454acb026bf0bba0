"""Which config a problem gets: tables loaded, buckets found, the ladder climbed."""
