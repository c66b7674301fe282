"""The verbs: a typed request in, a frozen dataclass out. Nothing is printed; events go to the
caller's `on_event`. `from fourfold import plan` finds them here."""
