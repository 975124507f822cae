"""Topics as sinks: each batch of a stream is one transaction, with a marker in it that says which batch it is."""
