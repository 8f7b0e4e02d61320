"""One rollout under way: requests come, are stepped, may be cancelled, and end as samples.

The host runs ahead of the device: an iteration is launched before the results of the one before it are read. A row
that has ended on the device may so be named by one more step, in which it gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from bailing_mtp.contracts.samples import FinishReason, PartialGroup, Prompt, Sample
from bailing_mtp.errors import UserError
from bailing_mtp.rollout.controller import Controller
from bailing_mtp.rollout.distribution import StepRules
from bailing_mtp.rollout.flights import Flights, Landed
from bailing_mtp.rollout.graphs import StepShape
from bailing_mtp.rollout.lockstep import Lockstep, Shapes, bucket
from bailing_mtp.rollout.requests import (
    Limits,
    Request,
    TextTokenizer,
    check_prompt,
    rules_of,
    stop_ids_of,
    write_settings,
)
from bailing_mtp.rollout.results import RowResult
from bailing_mtp.rollout.runner import Runner
from bailing_mtp.rollout.scheduler import Scheduler
from bailing_mtp.rollout.sequences import Plan, Row
from bailing_mtp.rollout.stats import RolloutStats
from bailing_mtp.rollout.stops import LENGTH, RUNNING, STOP, StopStrings

_REASONS: dict[int, FinishReason] = {STOP: "stop", LENGTH: "length"}
_IDLE = Plan((), (), (), (), ())


class RolloutSession:
    """Requests of one replica. Made by RolloutEngine.open.

    All ranks of a replica make the same calls in the same order. Where ep > tp the replicas of an expert-parallel
    group step together: each keeps calling `step` until it returns False, also without requests of its own.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        lockstep: Lockstep,
        limits: Limits,
        tokenizer: TextTokenizer | None,
        drafts: int,
        rollout_step: int,
        controller: Controller | None = None,
    ) -> None:
        """drafts: of every step, or the most of them where a controller chooses."""
        self._runner, self._scheduler, self._limits = runner, scheduler, limits
        self._lockstep, self._flights = lockstep, Flights(runner.program.route_format)
        self._tokenizer, self._drafts, self._rollout_step = tokenizer, drafts, rollout_step
        self._controller = controller
        self._rules = StepRules()
        self._view = runner.program.view
        self._requests: dict[Row, Request] = {}
        self._rows: dict[int, list[Row]] = {}
        self._done: list[Sample] = []
        self.stats = RolloutStats(drafts)

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt's samples. UserError for a request that could not run."""
        self.resume(PartialGroup(prompt, self._rollout_step))

    def resume(self, group: PartialGroup) -> None:
        """Queue those samples of a prompt that have not ended. UserError for a request that could not run."""
        prompt, tokenizer = group.prompt, self._tokenizer
        check_prompt(prompt, tokenizer, self._view.arch.vocab_size, self._limits)
        if prompt.index in self._rows:
            raise UserError(f"prompt {prompt.index}: was submitted before; allowed: another index")
        begun = {sample.sample_index: sample for sample in group.samples}
        responses = {index: begun[index].response_ids if index in begun else () for index in group.unfinished}
        sampling = prompt.sampling
        rows = self._scheduler.resume(prompt.prompt_ids, responses, sampling.max_new_tokens)
        self._rows[prompt.index] = rows
        self._rules = self._rules.joined(rules_of(sampling))
        stop_ids = stop_ids_of(prompt, tokenizer)
        for row in rows:
            strings, least = sampling.stop_strings, sampling.min_new_tokens
            watch = StopStrings(strings, tokenizer.decode, least) if strings else None
            request = self._requests[row] = Request(prompt, group.rollout_step, row, stop_ids, watch)
            if row.response:
                request.go_on(begun[row.sample_index])

    def cancel(self, prompt_index: int, sample_index: int | None = None) -> None:
        """End one sample of a prompt, or all of them, wherever they are; what they have is their response."""
        for row in self._rows[prompt_index]:
            if sample_index in (None, row.sample_index) and row.state != "done":
                self._finish(row, "cancelled")

    def suspend(self) -> list[Sample]:
        """End the session between two steps: all samples that have not ended, as they are, queued ones too.

        What is launched is read first; samples that end with it are left to `take`.
        """
        self.drain()
        rest = [request.sample("unfinished") for request in self._requests.values()]
        for row in self._requests:
            self._scheduler.finish(row)
        self._requests.clear()
        return rest

    def finished(self) -> bool:
        """Whether this replica has nothing left to do."""
        return not self._scheduler.has_work

    def take(self) -> list[Sample]:
        """Samples that have ended since the last call."""
        done, self._done = self._done, []
        return done

    def step(self) -> bool:
        """One iteration: admissions, a prefill, first tokens, one decode step are launched; what was launched
        before is read. False once all replicas are idle.

        Raises StaleWeights if the trainer has stepped since the session was opened.
        """
        scheduler = self._scheduler
        self._view.require_current()
        plan = scheduler.plan(self.drain) if scheduler.has_work else _IDLE
        running = [*plan.decode, *(row for row, _ in plan.starters)]
        n_padded, drafts = bucket(len(running)), self._drafts
        if self._controller is not None:
            drafts = self._controller.choose(n_padded, may_try=not (plan.prefill_tokens or plan.starters))
        wanted = Shapes(plan.prefill_tokens, len(plan.starters), n_padded, self._rules, drafts)
        shapes = self._lockstep.agree(wanted)
        # Once joined never parted: few sets of rules, few graphs.
        self._rules = shapes.rules
        if shapes.is_idle:
            self.drain()
            return False
        n_before = len(self._flights)
        self._launch(plan, running, shapes)
        for landed in self._flights.land(n_before):
            self._read(landed)
        self.stats.prefilled_tokens += plan.prefill_tokens
        self.stats.preemptions = scheduler.preemptions
        self.stats.stop_clock()
        return True

    def drain(self) -> None:
        """Read all that is launched."""
        for landed in self._flights.land(len(self._flights)):
            self._read(landed)
        self._flights.interrupt()

    def _launch(self, plan: Plan, running: Sequence[Row], shapes: Shapes) -> None:
        runner, flights = self._runner, self._flights
        if shapes.prefill_tokens:
            flights.interrupt()
        runner.apply(plan.before)
        runner.prefill(plan.chunks, shapes.prefill_tokens)
        runner.apply(plan.after)
        starters = [row for row, _ in plan.starters]
        write_settings(runner.memory, [self._requests[row] for row in starters])
        flights.add(starters, None, runner.start(plan.starters, shapes.starters, shapes.rules))
        step = StepShape(shapes.decode_rows, shapes.drafts, shapes.rules)
        if self._controller is not None and step.rows:
            self._controller.launched(step.rows, step.drafts)
        flights.add(running, step, runner.decode(running, step.rows, step.rules, step.drafts))
        runner.forget()

    def _read(self, landed: Landed) -> None:
        """Take results; those of rows that have ended meanwhile mean nothing."""
        shape, stats = landed.shape, self.stats
        live = [(row, found) for row, found in zip(landed.rows, landed.results, strict=True) if row.state == "running"]
        if shape is not None and live:
            stats.add_step(len(live), self._limits.max_running, shape.drafts)
        before = [*stats.reached, *stats.accepted]
        for row, result in live:
            kept = self._receive(row, result)
            if shape is not None:
                stats.add_row(kept, result.n_accepted, shape.drafts)
        if self._controller is not None and shape is not None:
            self._controller.timed(shape.rows, shape.drafts, shape, landed.seconds)
            new = [now - then for now, then in zip([*stats.reached, *stats.accepted], before, strict=True)]
            self._controller.tested(new[: stats.depths], new[stats.depths :])

    def _receive(self, row: Row, result: RowResult) -> int:
        """Take a row's new tokens; returns how many stay in the response."""
        request = self._requests[row]
        tokens, state, error = result.tokens, result.state, result.error
        cut = None if request.stop_strings is None else request.stop_strings.add(tokens)
        if cut is not None:
            tokens, state, error = tokens[:cut], STOP, False
        kept = len(tokens)
        if result.routes is not None:
            self._runner.routes.committed(row, result.routes)
        row.response += tokens
        request.logprobs += result.raw[:kept]
        request.processed_logprobs += result.processed[:kept]
        request.kept_logmass += result.kept_logmass[:kept]
        request.versions += [self._view.version] * kept
        self.stats.tokens += kept
        if error:
            position = len(row.prompt_ids) + len(row.response)
            self._finish(row, "error", f"the logits for position {position} are not finite")
        elif state != RUNNING:
            self._finish(row, _REASONS[state])
        return kept

    def _finish(self, row: Row, reason: FinishReason, error: str | None = None) -> None:
        self._scheduler.finish(row)
        self._done.append(self._requests.pop(row).sample(reason, error, self._runner.routes.take(row)))
        self.stats.samples += 1
