"""The rules a layout must satisfy to run: one table, in three parts."""
