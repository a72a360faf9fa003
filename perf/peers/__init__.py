"""Other replay buffers doing the same work as Conduit, each in a process and a virtual environment of its own.

    cases      what is asked of everybody: named frozen cases over the frozen workloads, and their rows
    adapter    the protocol's far side: one subclass of `Adapter` per library, served over pipes
    driver     the near side: starts adapters, lets one of them work at a time, compares what they hand out
    feed       writer processes that hand ticks to a queue
    setup      makes the virtual environments
    numpy_ring, cpprb_buffer, sb3, tianshou_buffer, torchrl_tensor, torchrl_memmap, rllib, reverb_table, flashbax_buffer,
    pufferlib_buffer, conduit_engine
               the adapters

Only `conduit_engine` may import conduit. What else an adapter imports from here needs numpy and nothing more.
"""
