"""Choose the config of a problem: nearest bucket, estimate between sizes, ladder, one for every batch."""
