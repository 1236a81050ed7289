"""Planning of a session's nodes: plan, deploy, profile, learn from traces, migrate."""
