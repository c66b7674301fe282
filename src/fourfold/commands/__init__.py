"""One file per command: HELP, add_arguments(parser) and run(args) -> exit code."""
