"""Recipes keep their arguments."""

import enum


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Recipe:
    multiple = 16

    def __init__(self, fp8_format: Format, fp8_dpa: bool = False) -> None:
        self.fp8_format, self.fp8_dpa = fp8_format, fp8_dpa


class DelayedScaling(Recipe):
    pass


class Float8CurrentScaling(Recipe):
    pass


class Float8BlockScaling(Recipe):
    pass


class MXFP8BlockScaling(Recipe):
    multiple = 32
