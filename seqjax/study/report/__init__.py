"""Make a study's tables and pictures; they read only rows and records."""
