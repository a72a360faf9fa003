"""First hour: the first experiences of a new user, from the wheel to a job that is killed. Each module has some rows, in `GROUPS`."""
