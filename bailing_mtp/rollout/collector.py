"""Python's garbage collector during a rollout.

A full collection looks at every object of the process, a quarter of a second with torch loaded, in which no step is
launched. What is alive when a rollout begins is therefore left out of collections until it ends.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def old_objects_kept() -> Iterator[None]:
    """Inside, collections look at objects made inside alone. Does nothing where most objects are frozen already."""
    if gc.get_freeze_count() > len(gc.get_objects()):
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
