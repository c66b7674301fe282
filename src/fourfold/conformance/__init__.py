"""Other engines against one process: their own parallel code with tiny models, compared by element
with a plain decoder, and a name for what differs. `ranks` runs where torch and the engine are."""
