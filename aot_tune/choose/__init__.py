"""Choose the config of a problem: the nearest bucket, the estimate between sizes, the ladder, a batch."""
