"""What a stored run says: summary, timing, quality, comparison."""
