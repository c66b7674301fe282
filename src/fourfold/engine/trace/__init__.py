"""The steps of a trace, run with real tensors."""
