"""One file per axis; order.py applies them to a stage in one readable order."""
