"""Tables of parameter servers: rows in ranges on several servers, of which windows use a few."""
