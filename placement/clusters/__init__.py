"""Devices, hosts, links and switches: described, checked, read from files."""
