"""What a rank holds, computes, sends and waits for, observed while it runs."""
