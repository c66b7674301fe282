"""What must hold for a layout to run: one table of rules, in three parts."""
