"""An exam of planners: tasks without answers, submissions, and their scores."""
