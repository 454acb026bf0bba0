"""The tuner: plan, compile, measure, verify, choose, publish. Slow and careful; a serving process never imports it."""
