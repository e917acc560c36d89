"""What users write: the run-config, the cluster file, and the access rules that follow from it."""
