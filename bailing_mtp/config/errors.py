"""The config's own kind of user error: several mistakes, told at once."""

from bailing_mtp.errors import UserError


class ConfigError(UserError):
    """One or more mistakes in the config; `problems` holds one line for each, every line naming its key."""

    def __init__(self, *problems: str) -> None:
        assert problems, "a ConfigError names at least one problem"
        super().__init__("\n".join(problems))
        self.problems = problems


def raise_if_any(problems: list[str]) -> None:
    """Raise one ConfigError that holds every line of `problems`; do nothing for an empty list."""
    if problems:
        raise ConfigError(*problems)
