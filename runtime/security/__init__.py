"""Who may talk to whom beyond loopback: keys on disk, and a guard at the sockets."""
