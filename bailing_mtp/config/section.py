"""The base of every config section: frozen, strict, closed.

An integer may stand for a float; nothing else is converted, unknown keys and NaN or infinite numbers are
errors, and validation never rewrites a value. The docstring under a field is its description.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """One node of the config tree."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        # `model_` is an ordinary prefix here, not pydantic's own namespace.
        protected_namespaces=(),
    )


PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
# YAML knows lists only, so a tuple accepts one; its items stay strict.
TokenIds = Annotated[tuple[NonNegativeInt, ...], Field(strict=False)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
