"""What stands behind a recurrence: a norm per head, a second operand on top, and a gate."""
