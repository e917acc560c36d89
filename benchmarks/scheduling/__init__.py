"""Decision times of the scheduler, its radio solver, and its distance from the optimum."""
