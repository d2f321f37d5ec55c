"""Models from the Hub: which files of a repository are wanted, and how they come into the cache."""
