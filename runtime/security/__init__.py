"""Keys on disk, authentication of connections, and limits on what strangers may send."""
