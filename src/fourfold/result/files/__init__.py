"""The run store and training folders: files that others may have touched."""
