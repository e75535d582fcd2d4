"""HTTP to and from clients, of no dialect: sockets, connections, bodies, errors, processes on a port."""
