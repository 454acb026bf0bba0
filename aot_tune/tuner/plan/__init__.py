"""What is compiled and measured: candidates, the model's shortlist."""
