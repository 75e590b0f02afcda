"""The tests in `outside` need packages that the main environment does not have; they run in one of their own."""

collect_ignore_glob = ["outside/*"]
