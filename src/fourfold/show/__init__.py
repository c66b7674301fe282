"""Show: tables as text, Markdown, CSV and JSON; plots."""
