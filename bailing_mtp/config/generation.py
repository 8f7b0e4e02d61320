"""Config of the verb that generates."""

from pathlib import Path
from typing import Self

from pydantic import model_validator

from .errors import ConfigError
from .rollout import RolloutConfig, SamplingConfig, check_rollout
from .section import Text
from .verbs import RunConfig


class GenerateConfig(RunConfig):
    """python -m recipes.generate"""

    prompts: Text
    """JSONL: {"prompt": text}, {"messages": [...]} or {"prompt_ids": [...]}; a line may hold its own "sampling"."""
    output: Text
    """JSONL that is written, one line per sample; its numbers go to <output>.stats.json."""
    tokenizer: Text | None = None
    """tokenizer.json or a directory that holds it; null = that of checkpoint.load, else prompt_ids only."""
    chat_template: Text | None = None
    """Jinja file for messages, or plain; null = the template beside the tokenizer."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    rollout: RolloutConfig = RolloutConfig()
    """The rollout engine."""

    @model_validator(mode="after")
    def _rollout_settings_agree(self) -> Self:
        check_rollout(self.rollout, self.parallel.tp)
        return self

    @model_validator(mode="after")
    def _output_is_not_input(self) -> Self:
        if Path(self.prompts).resolve() == Path(self.output).resolve():
            raise ConfigError(f"output: {self.output!r} is also prompts; name another file")
        return self
