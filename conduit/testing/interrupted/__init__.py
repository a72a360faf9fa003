"""Scenarios for interrupts: operations that conduit.testing.interrupting interrupts at each point, and checks afterwards in the same process.

Each scenario has an engine of its own. `operate` is the interrupted operation. `check` does what a program does after it caught the
exception: it goes on with the same objects. Rows can be checked, since all values of row n follow from n, and so do the ends of episodes
and the final observations.
"""
