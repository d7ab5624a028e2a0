"""Tables and pictures of a study. They read rows and records only."""
