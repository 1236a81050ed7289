"""The HTML page of a plan: payload, template and scripts."""
