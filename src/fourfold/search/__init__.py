"""Choose: what is legal, what there is to choose from, and what is fastest."""
