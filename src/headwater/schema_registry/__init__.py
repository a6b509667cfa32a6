"""The schema registry: schema types, compatibility rules, and registration."""
