"""Peak memory of every role, each in a process of its own."""
