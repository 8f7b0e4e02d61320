"""torchrun without its own traceback: a rank that fails has already said why.

Only a rank that was killed could not speak, so its end is reported here, in one line.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def launch(arguments: list[str]) -> int:
    """Launch as torchrun does; returns the exit code of the rank that failed first, 0 if none did."""
    # The launcher's own lines only repeat that a rank ended, and that it ended the others.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        print(f"error: rank {rank} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
