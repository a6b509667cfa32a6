"""Measurements against honest floors. `./dev bench` lists them; each ends with one line of JSON."""
