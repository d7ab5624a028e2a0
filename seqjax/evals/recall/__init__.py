"""Train small models on recall and state-tracking tasks, in minutes each."""
