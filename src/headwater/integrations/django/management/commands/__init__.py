"""Management commands of Django, one file each."""
