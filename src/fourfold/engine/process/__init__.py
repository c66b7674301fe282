"""A rank as a process: it is forked, told its tasks, beats, fails and stops."""
