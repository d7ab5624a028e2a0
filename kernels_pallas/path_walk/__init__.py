"""Attention of every chunk's queries to the chunks before it, which change the queries as they pass: PaTH's."""
