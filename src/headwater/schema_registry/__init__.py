"""The schema registry: schemas of each type, what may follow what, and registering them."""
