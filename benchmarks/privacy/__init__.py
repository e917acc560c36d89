"""What members of a deployment can read of training data, by attacks on recorded frames."""
