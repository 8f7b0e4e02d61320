"""The one error that a user can mend: recipes end with its message alone, every other keeps its traceback."""


class UserError(ValueError):
    """A mistake in a file, a key or the launch. The message names it, its value and what is allowed."""
