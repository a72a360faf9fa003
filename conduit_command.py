"""What the script `conduit` calls. It lies beside the package, so that it runs before the package is imported.

Importing the package takes a good part of a second. An interrupt in that time ends the process as it ends a command later:
exit code 130, and no traceback.
"""

from __future__ import annotations

import os
import signal

_INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    # whoever starts a command with SIGINT ignored, as a shell's `&` does, has it ignored
    early = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if early:
        # at once: nothing has been done, and an exception in the middle of an extension's import may become another
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from conduit.cli import run

    run(signal.default_int_handler if early else None)


if __name__ == "__main__":
    main()
