"""Tables of measured runs in the reference schema, read and predicted."""
