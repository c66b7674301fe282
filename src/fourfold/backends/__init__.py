"""Everything about an engine in a folder of its own: what it can run and its habits (engine.toml),
its settings, its logs, and what speaks to it for `verify --engine` (docs/adding.md)."""
