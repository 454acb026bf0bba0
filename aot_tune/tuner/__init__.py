"""The tuner: plan, compile, measure, verify, choose, publish. No serving process imports it."""
