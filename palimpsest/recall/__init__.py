"""Who remembers what: small models on synthetic tasks, cell by cell."""
