"""Change capture: what pgoutput says, a slot to read it from, and snapshots that fit to it."""
