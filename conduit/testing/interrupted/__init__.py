"""Operations that are interrupted at each of their points, and what must hold afterwards, while the process lives on.

Each scenario has an engine of its own. `operate` is what is interrupted; `check` does what a program does that caught the
exception: it goes on with the same objects. Rows prove themselves: every value of row n follows from n, and so does whether it
ends its episode, with which final observation. conduit.testing.interrupting interrupts.
"""
