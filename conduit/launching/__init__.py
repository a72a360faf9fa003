"""Actors in processes of their own: started, watched, started again when they die, and ended with their owner.

    launch    the call, and its checks
    payload   the function and its arguments, pickled once for every start
    actors    the owner's handle
    crew      the thread that starts, watches, restarts and ends processes
    process   one process, from its start to the end of its process group
    report    the reason for a process's end, which the process writes
    deaths    the error about it
    child     the code in the process: it runs the actor function, and writes the report
    actor     the object that tells an actor function which actor it is

Importing this package starts no thread and no process.
"""
