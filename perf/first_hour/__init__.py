"""First hour: what a new user meets, from the wheel to a job that is killed. A module holds some rows, in `GROUPS`."""
