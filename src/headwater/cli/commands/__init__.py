"""The commands of the command line: one module for each noun, imported when one of its commands is called."""
