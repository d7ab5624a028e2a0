"""Define a study's runs, train them, and read their losses."""
