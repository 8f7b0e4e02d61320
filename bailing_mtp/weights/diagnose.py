"""What a checkpoint holds, from its headers alone: the rows of `doctor`'s table, and what would not train."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.check import MAX_LISTED, TensorCheck, check_tensors
from bailing_mtp.weights.checkpoint_files import CheckpointFiles
from bailing_mtp.weights.sharded.reader import PASSED_NAME
from bailing_mtp.weights.stored import CONFIG_NAME


@dataclass(frozen=True)
class Diagnosis:
    """Rows (name, value) of the table, and one line for everything that would not train."""

    rows: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]


def diagnose(files: CheckpointFiles) -> Diagnosis:
    """Describe a checkpoint of either kind. Raises UserError for a config that is no model of this package."""
    arch = Architecture.from_hf(files.config, str(files.directory / CONFIG_NAME))
    check = check_tensors(files, arch)
    n_bytes = sum(tensor.n_bytes for tensor in files.tensors.values())
    dtypes = Counter(tensor.dtype for tensor in files.tensors.values())
    rows = [
        ("checkpoint", str(files.directory)),
        ("kind", _kind(files)),
        ("architecture", ", ".join(files.config.get("architectures", []))),
        ("layers", _layers(arch)),
        ("sizes", _sizes(arch)),
        ("tensors", f"{len(files.tensors):,}, {n_bytes / 1e9:,.3f} GB"),
        ("dtypes", ", ".join(f"{dtype} x {n:,}" for dtype, n in dtypes.most_common())),
        ("expert bias", _expert_bias(files, check)),
        ("MTP layer", _mtp(files, arch, check)),
    ]
    for name, values in (("missing", check.missing), ("unknown", check.extra), ("unusable", check.unusable)):
        rows.append((name, _listed(values)))
    return Diagnosis(tuple(rows), tuple(_problems(arch, check)))


def _kind(files: CheckpointFiles) -> str:
    if files.sharded is None:
        return "Hugging Face directory"
    state = files.sharded.state
    if "config" not in state:
        return "sharded, weights alone"
    layout = state["layout"]
    return (
        f"sharded, after step {state['step']}, with optimizer (written by {layout['world_size']} ranks, "
        f"tp={layout['tp']} ep={layout['ep']})"
    )


def _layers(arch: Architecture) -> str:
    plan = arch.trunk_plan()
    counts = Counter(f"{layer.mixer.upper()}+{layer.mlp}" for layer in plan)
    return f"{len(plan)}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items())


def _sizes(arch: Architecture) -> str:
    parts = [f"hidden {arch.hidden_size}", f"vocabulary {arch.vocab_size}", f"heads {arch.num_heads}"]
    if arch.num_experts:
        parts.append(f"experts {arch.num_experts} x {arch.moe_intermediate_size}, top {arch.experts_per_token}")
    return ", ".join(parts)


def _expert_bias(files: CheckpointFiles, check: TensorCheck) -> str:
    present = [t.dtype for name, t in files.tensors.items() if name.endswith(".expert_bias")]
    # The table's MTP row says it when the whole layer is absent.
    mtp_missing = check.mtp_missing if check.mtp_present else ()
    absent = [name for name in (*check.missing, *mtp_missing) if name.endswith(".expert_bias")]
    if not present and not absent:
        return "none (no expert layers)"
    kinds = ", ".join(sorted(set(present))) or "none"
    return f"{len(present)} present ({kinds})" + (f", {len(absent)} missing" if absent else "")


def _mtp(files: CheckpointFiles, arch: Architecture, check: TensorCheck) -> str:
    says = f"config says {arch.num_mtp_layers}"
    if not check.mtp_present:
        return f"missing ({says})"
    if not check.mtp_complete:
        wrong = _listed((*check.mtp_missing, *check.mtp_wrong))
        return f"partial ({says}), missing or wrong: {wrong}"
    passed = files.sharded is not None and any(files.tensors[n].file.name == PASSED_NAME for n in check.mtp_present)
    return f"complete, {len(check.mtp_present)} tensors ({says}" + (", passed through untrained)" if passed else ")")


def _problems(arch: Architecture, check: TensorCheck) -> list[str]:
    problems = [f"missing {name}" for name in check.missing[:MAX_LISTED]]
    problems += [f"unknown tensor {name}" for name in check.extra[:MAX_LISTED]]
    problems += [f"unusable {entry}" for entry in check.unusable[:MAX_LISTED]]
    n_files = 1 if check.mtp_present else 0
    if check.mtp_present and not check.mtp_complete:
        problems.append("the MTP layer is partial; checkpoint.allow_fresh_mtp=true starts it afresh")
    elif n_files != arch.num_mtp_layers:
        hint = "mtp.loss_scale and speculation need it; graft_from=<base dir> target=<new dir> gives a copy that has it"
        problems.append(
            f"num_nextn_predict_layers is {arch.num_mtp_layers}, but the files hold {n_files} MTP layers"
            + (f" ({hint})" if not n_files else "")
        )
    return problems


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more if names else "none"
