"""Read: logs and tables of other engines become measured rows of the reference schema."""
