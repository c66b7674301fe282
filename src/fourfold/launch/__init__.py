"""Run: start the torch processes of a job, watch them, and make a report of whatever happens."""
