"""The notebook of the project: runs, tables, one-off scripts. It uses the library; nothing imports it."""
