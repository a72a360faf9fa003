"""Actors in processes of their own: started, watched, started again when they die, and ended with their owner.

    launch    the call, and what it refuses
    payload   the function and its arguments, pickled once for every start
    actors    the handle that the owner holds
    crew      the thread that starts, notices, restarts and ends processes
    process   one process, from its start until nothing is left of it
    report    what a process leaves as the reason of its end
    deaths    the error that tells of it
    child     what runs in it: the actor function, and the report of what ended it
    actor     what an actor function knows of itself

Importing this starts no thread and no process.
"""
