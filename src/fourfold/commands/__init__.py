"""One file per command: a docstring (its help), add_arguments(parser), run(args) -> exit code."""
