"""Where each node of a session runs: plan, deploy, profile, learn from traces, migrate."""
