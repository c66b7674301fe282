"""What programs may ask: a few verbs as tools with schemas, for agents, within one folder."""
