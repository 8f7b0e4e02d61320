"""The rollout engine: prompts in, samples out, on the trainer's own weights.

A replica is one tensor-parallel group. Replica r of n takes prompts r, r + n, ... of a rollout; the replicas of one
expert-parallel group (ep > tp) run in lock step and end together. Where a rollout ends when enough groups are
complete, all replicas end together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from bailing_mtp.config import RolloutConfig
from bailing_mtp.contracts.samples import PartialGroup, Prompt, RolloutGroup, Sample
from bailing_mtp.errors import UserError
from bailing_mtp.kernels.reference import decode as torch_kernels
from bailing_mtp.log import logger
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.collector import old_objects_kept
from bailing_mtp.rollout.compute import TpSums
from bailing_mtp.rollout.controller import Controller
from bailing_mtp.rollout.draft import Drafter, MtpDrafter
from bailing_mtp.rollout.graphs import Capturer, CudaCapturer, StepGraphs
from bailing_mtp.rollout.launch import DecodeSteps
from bailing_mtp.rollout.lockstep import Lockstep, bucket, buckets
from bailing_mtp.rollout.memory import GIB, MemoryPlan, RolloutMemory
from bailing_mtp.rollout.peer_room import peer_bytes, peer_rows
from bailing_mtp.rollout.prefill import prefill_kernels
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.reduced_head import ReducedHead, read_draft_ids
from bailing_mtp.rollout.requests import Limits, TextTokenizer, check_prompt, stop_ids_of
from bailing_mtp.rollout.runner import Runner
from bailing_mtp.rollout.scheduler import Scheduler
from bailing_mtp.rollout.session import RolloutSession
from bailing_mtp.rollout.stats import RolloutStats
from bailing_mtp.rollout.tally import Advanced, Tally, part
from bailing_mtp.weights.names import Shard
from bailing_mtp.weights.view import WeightsView

MAX_TEMPLATES = 8
"""Shared prompts that wait prefilled for their samples to be forked."""
AGREE_STEPS = 8
"""Steps between two counts of complete groups over several replicas."""


class RolloutEngine:
    """Rollouts of one model: whole ones by `generate`, over-sampled ones by `advance`, or request by request in a
    session from `open`."""

    def __init__(
        self,
        view_source: Callable[[], WeightsView],
        context: ParallelContext,
        config: RolloutConfig,
        tokenizer: TextTokenizer | None = None,
        drafter: Drafter | None = None,
        tell: Callable[[str], None] = logger.info,
        make_capturer: Callable[[torch.device], Capturer] = CudaCapturer,
        records_routes: bool = False,
        kernels: ModuleType | None = None,
    ) -> None:
        """view_source: gives the weights as they are when a rollout begins. tokenizer: ends responses at its
        end-of-text ids, and finds stop strings. tell: gets a line for each wait at the start, such as captures.
        records_routes: samples bring the experts of their tokens. kernels: decode kernels in place of those that the
        config names. Collective."""
        self._view_source, self._context, self._config = view_source, context, config
        # Of decode steps alone: prefills and first tokens are eager.
        self._step_context = context.for_graphs if config.cuda_graphs else context
        self._tokenizer, self._drafter = tokenizer, drafter
        assert drafter is None or config.draft_vocabulary is None, "a vocabulary of drafts is for the MTP layer's own"
        self._tell, self._make_capturer = tell, make_capturer
        self._records_routes = records_routes
        self._kernels = kernels or _decode_kernels(config.kernels)
        self._lockstep = Lockstep(context, config.adaptive)
        self._controller = Controller(config.speculative_tokens) if config.adaptive else None
        self._reduced: ReducedHead | None = None
        self._memory: RolloutMemory | None = None
        self._peers: TpSums | None = None
        self._steps: DecodeSteps | None = None
        self.stats = RolloutStats(config.speculative_tokens)
        """Of the last rollout by `generate` or `advance`, over all replicas."""

    @property
    def memory_bytes(self) -> int:
        """Device memory for caches, states, graphs and the rows of rollout.draft_vocabulary that this rank holds now;
        0 between rollouts without keep_memory."""
        if self._memory is None or self._steps is None:
            return 0
        graphs = self._steps.graphs
        held_bytes = self._memory.plan.beside_bytes + sum(tensor.nbytes for tensor in self._memory.tensors())
        return held_bytes + (0 if graphs is None else graphs.pool_bytes)

    @property
    def slot_bytes(self) -> int:
        """Of the memory held now: bytes of one running row without its latents; 0 where none is held."""
        return 0 if self._memory is None else self._memory.plan.slot_bytes

    def generate(
        self,
        prompts: Sequence[Prompt],
        rollout_step: int = 0,
        progress: Callable[[RolloutStats], None] | None = None,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> list[RolloutGroup]:
        """All samples of all prompts, in the order of `prompts`, on every rank. Collective.

        Every rank passes the same prompts. rollout_step is the second word of the noise key. `progress` and
        `on_sample` see this replica's part, as it comes. UserError, before anything runs, for a prompt that
        could not run or a rollout.memory_gb that is too little.
        """
        groups = [PartialGroup(prompt, rollout_step) for prompt in prompts]
        return self.advance(groups, len(groups), progress=progress, on_sample=on_sample).complete

    def advance(
        self,
        groups: Sequence[PartialGroup],
        enough: int,
        required: frozenset[int] = frozenset(),
        progress: Callable[[RolloutStats], None] | None = None,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> Advanced:
        """Take groups further until `enough` of them are complete, the `required` ones (prompt indices) among them.

        Groups are served in their order. Those beyond `enough`, and all that are not complete, are handed back as
        they are, for a later call, on every rank alike. Which groups are complete first depends on the layout of
        ranks and on rollout.max_running; on nothing that is measured. Otherwise as `generate`.
        """
        assert enough <= len(groups), f"{enough} of {len(groups)} groups"
        if not groups:
            return Advanced([], [])
        prompts = [group.prompt for group in groups]
        limits = self._limits(prompts)
        self._check(prompts, limits)
        open_groups = [group for group in groups if not group.is_complete]
        tally = Tally(open_groups[self._context.dp_rank :: self._context.dp], required, on_sample)
        session = self.open(limits)
        try:
            for group in tally.groups:
                session.resume(group)
            # Where all are wanted a rollout ends by itself, and no replica has to wait for another.
            missing = None if enough == len(groups) else enough - (len(groups) - len(open_groups))
            with old_objects_kept():
                unfinished = self._run(session, tally, missing, progress)
        finally:
            self.close()
        self.stats = session.stats.joined(self._context.sum_over_dp)
        parts = self._gather((tally.ended, unfinished))
        ended = [pair for mine, _ in parts for pair in mine]
        return part(groups, ended, [sample for _, rest in parts for sample in rest], enough, required)

    def _run(
        self,
        session: RolloutSession,
        tally: Tally,
        missing: int | None,
        progress: Callable[[RolloutStats], None] | None,
    ) -> list[Sample]:
        """Step until `missing` groups of all replicas are complete; returns the samples that have not ended."""
        n_steps, is_busy = 0, True
        while self._goes_on(tally, missing, is_busy):
            for _ in range(1 if self._context.dp == 1 else AGREE_STEPS):
                is_busy = session.step()
                if not is_busy:
                    break
                n_steps += 1
                tally.add(session.take(), n_steps)
                if progress is not None:
                    progress(session.stats)
        unfinished = session.suspend()
        tally.add(session.take(), n_steps)
        return unfinished

    def _goes_on(self, tally: Tally, missing: int | None, is_busy: bool) -> bool:
        """The same on every rank if groups are counted: a replica without work then waits for the others."""
        if missing is None:
            return is_busy
        counts: Sequence[float] = (tally.n_complete, tally.n_required_open, is_busy)
        if self._context.dp > 1:
            counts = self._context.sum_over_dp(counts)
        n_complete, n_required_open, n_busy = counts
        return n_busy > 0 and (n_complete < missing or n_required_open > 0)

    def open(self, limits: Limits, rollout_step: int = 0) -> RolloutSession:
        """Take memory and the current weights. `close` gives the memory back. rollout_step: of submitted prompts.

        Raises ValueError if drafts are asked for and the weights have no MTP layer, UserError if
        rollout.memory_gb is too little.
        """
        view, config, context = self._view_source(), self._config, self._context
        view.require_current()
        if config.speculative_tokens and view.mtp is None:
            raise ValueError(f"rollout.speculative_tokens={config.speculative_tokens} needs an MTP layer")
        reduced = self._reduced_head(view)
        memory = self._take_memory(view, limits)
        if reduced is not None:
            reduced.refresh(view.head_vH)
        if self._controller is not None:
            self._controller.begin()
        scheduler = Scheduler(
            limits.max_running,
            limits.n_templates,
            memory.plan.n_blocks,
            memory.plan.block_tokens,
            config.prefill_tokens,
            config.speculative_tokens,
        )
        prefills = prefill_kernels(config.kernels, view.embedding_vH.dtype)
        eager, stepped = (
            Program(view, memory, where, self._kernels, prefills, self._records_routes, peers)
            for where, peers in ((context, None), (self._step_context, self._peers))
        )
        steps = self._bound_steps(stepped, limits)
        fixed_reach = self._kernels is not torch_kernels
        runner = Runner(eager, memory, steps, context.tp_group, fixed_reach)
        drafts = config.speculative_tokens
        return RolloutSession(
            runner, scheduler, self._lockstep, limits, self._tokenizer, drafts, rollout_step, self._controller
        )

    def close(self) -> None:
        """End a rollout; its session is of no more use. Memory stays only with rollout.keep_memory."""
        if not self._config.keep_memory:
            self.release()

    def release(self) -> None:
        """Give all memory back to the device, graphs included. Called before the process groups end: ending one waits
        for the graphs that hold its collectives."""
        if self._steps is not None and self._steps.graphs is not None:
            self._steps.graphs.release()
        self._steps = None
        if self._reduced is not None:
            self._reduced.release()
        if self._memory is not None:
            self._memory.release()
            self._memory = self._peers = None

    def _limits(self, prompts: Sequence[Prompt]) -> Limits:
        """What these prompts need; the same on every rank."""
        dp = self._context.dp
        n_samples = max(sum(p.samples_per_prompt for p in prompts[r::dp]) for r in range(dp))
        longest = max(len(p.prompt_ids) + p.sampling.max_new_tokens for p in prompts)
        return Limits(
            context_tokens=self._config.context_tokens or longest,
            max_running=min(self._config.max_running, n_samples),
            n_templates=min(MAX_TEMPLATES, sum(p.samples_per_prompt > 1 for p in prompts)),
            max_stops=max(1, max(len(stop_ids_of(p, self._tokenizer)) for p in prompts)),
            max_suppressed=max(1, max(len(p.sampling.suppress_token_ids) for p in prompts)),
        )

    def _check(self, prompts: Sequence[Prompt], limits: Limits) -> None:
        arch = self._view_source().arch
        if limits.context_tokens > arch.max_positions:
            raise UserError(
                f"rollout.context_tokens: {limits.context_tokens} tokens of prompt and response exceed the "
                f"model's {arch.max_positions} positions"
            )
        if len({prompt.index for prompt in prompts}) != len(prompts):
            raise UserError("prompts: two of them have the same index")
        for prompt in prompts:
            check_prompt(prompt, self._tokenizer, arch.vocab_size, limits)

    def _take_memory(self, view: WeightsView, limits: Limits) -> RolloutMemory:
        config, context = self._config, self._context
        dtype, most = view.embedding_vH.dtype, limits.max_running
        beside_bytes = peer_bytes(config, context.tp, most, view.arch.hidden_size, dtype)
        beside_bytes += 0 if self._reduced is None else self._reduced.row_bytes(view.head_vH)
        plan = MemoryPlan.build(
            view.arch,
            Shard(context.tp, context.tp_rank, context.ep, context.ep_rank),
            config.speculative_tokens,
            limits.max_running,
            limits.n_templates,
            limits.context_tokens,
            min(config.block_tokens, limits.context_tokens),
            dtype,
            None if config.memory_gb is None else int(config.memory_gb * GIB),
            limits.max_stops,
            limits.max_suppressed,
            beside_bytes,
        )
        if self._memory is not None and self._memory.plan != plan:
            self.release()
        if self._memory is None:
            rows = peer_rows(config, context.tp, most)
            if rows:
                # Imports Triton, as only this key wants it.
                peers = importlib.import_module("bailing_mtp.rollout.peers")
                group, sizes = self._step_context.tp_group, (plan.hidden_size, dtype, context.device)
                self._peers = peers.PeerSums.make(group, rows, *sizes)
            self._memory = RolloutMemory(plan, context.device)
        return self._memory

    def _reduced_head(self, view: WeightsView) -> ReducedHead | None:
        """Raises UserError for a rollout.draft_vocabulary that will not do."""
        path = self._config.draft_vocabulary
        if self._reduced is None and path is not None:
            v = view.head_vH.shape[0]
            ids = read_draft_ids(path, view.arch.vocab_size)
            self._reduced = ReducedHead(ids, self._context.tp_rank, v)
        return self._reduced

    def _bound_steps(self, program: Program, limits: Limits) -> DecodeSteps:
        """The steps of this rollout; their graphs are those of the last one if memory and weights are."""
        if self._steps is None:
            graphs = None
            if self._config.cuda_graphs:
                most = len(buckets(limits.max_running))
                capturer = self._make_capturer(self._context.device)
                graphs = StepGraphs(capturer, self._lockstep.any_rank, most, self._tell)
            self._steps = DecodeSteps(program.memory, bucket(limits.max_running), graphs, program.route_format)
        if self._steps.graphs is not None:
            self._steps.graphs.require_addresses([tensor.data_ptr() for tensor in program.view.tensors()])
        self._steps.bind(program, self._drafter or MtpDrafter(self._reduced), self._step_context.tp_group)
        return self._steps

    def _gather(self, mine: Any) -> list[Any]:
        """What every replica has, on every rank."""
        everyone: list[Any] = [mine]
        if self._context.dp > 1:
            everyone = [None] * self._context.dp
            dist.all_gather_object(everyone, mine, group=self._context.dp_group)
        return everyone


def _decode_kernels(name: str) -> ModuleType:
    """Triton is imported only where the config names it."""
    return torch_kernels if name == "torch" else importlib.import_module("bailing_mtp.kernels.triton.decode")
