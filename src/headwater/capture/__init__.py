"""Change data capture: the pgoutput decoder, replication slots, and snapshots consistent with the changes."""
