"""What a run directory holds: its files, and the events of `events.jsonl` with their fields.

The reference page about the run directory is made from these tables, and `RunDirectory.log_event`
takes only the events named here. `tests/run_directory/test_contents.py` compares them with every
call that writes an event.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

EventName = Literal[
    "start",
    "resume",
    "plan",
    "compile",
    "eval",
    "checkpoint",
    "decision",
    "remesh",
    "rollback",
    "phase",
    "profile",
    "fault",
    "end",
]

CONFIG_FILE, PLAN_FILE = "config.json", "plan.json"
METRICS_FILE, ABANDONED_FILE = "metrics.jsonl", "metrics.abandoned.jsonl"
EVENTS_FILE, SWITCHES_FILE = "events.jsonl", "switches.jsonl"
REPORT_FILE = "report.html"
PROFILES = "profiles"
"""Directory of a run's profiles."""
EXPORTS = "exports"
"""Directory of a run's exports, unless `export.dir` names another."""

FILES: Mapping[str, str] = {
    CONFIG_FILE: "Settings of the run, and the values that it chose for open ones.",
    PLAN_FILE: "The plan in use.",
    METRICS_FILE: "A line for each step.",
    ABANDONED_FILE: "Lines of steps that were done again after an older checkpoint.",
    EVENTS_FILE: "A line for each event.",
    "checkpoints": "States of the run, by step.",
    "damaged": "Checkpoints that could not be restored.",
    "abandoned": "Checkpoints of steps that were done again.",
    "tokenizer.json": "Copy of the tokenizer; missing if tokens are bytes.",
    "tokenizer_config.json": "Names the tokenizer's special tokens.",
    "chat_template.jinja": "Copy of the tokenizer's chat template, if it has one.",
    "lock": "Held by the process that writes.",
    "progress": "Heartbeats of the processes.",
    "faults": "Faults that each process has noticed: lines as of the event `fault`.",
    SWITCHES_FILE: "Journal of switches between plans: up to three lines for each.",
    "lost_devices.json": "Written by the user: ids of devices to move away from.",
    "tensorboard": "The metrics for TensorBoard, if it is on.",
    "trackers.json": "Names by which trackers know the run.",
    "wandb": "Files of Weights & Biases, if it is on.",
    EXPORTS: "Exported models of `export.every`, by step.",
    PROFILES: "Profiles of `--profile`, by their first step: a trace, the compiled step, and where"
    " the time went (profile.json).",
    REPORT_FILE: "Page written by `optimus report`.",
}
"""Files and folders; most appear only when there is something to write."""

SWITCH_RECORDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "begin": (
        "The state is about to be moved.",
        {
            "step": "Step after which it moves.",
            "source": "The plan before, as in plan.json.",
            "target": "The new plan.",
            "why": "Reason for the switch.",
            "by_choice": "False if the run had to leave its plan, or its user asked for it.",
        },
    ),
    "commit": (
        "The state has been moved and verified, and plan.json has the new plan.",
        {
            "step": "As in `begin`.",
            "plan": "Digest of the new plan.",
            "costs_s": "Seconds of delay of the run so far, by phase.",
        },
    ),
    "end": (
        "The first steps under the new plan are over, or the switch has failed.",
        {
            "step": "Last step before this line.",
            "ending": (
                "`kept`: the new plan stays. `stopped`: the run was ended on purpose in the first"
                " steps. `taken back`: the run went back after them. `failed`: the move failed."
                " `died`: the process died."
            ),
            "why": "Reason.",
            "costs_s": "Seconds of delay of the run in all, by phase.",
        },
    ),
}
"""Lines of switches.jsonl, by their field `record`: when each is written, and its fields. All have
`time_s` too."""


@dataclass(frozen=True)
class EventKind:
    """What an event says."""

    when: str
    """When it is written."""
    fields: Mapping[str, str]
    """Its own fields and their meaning; an event may lack those that do not apply."""


COMMON = {
    "event": "Name of the event.",
    "step": "Last finished step; 0 before the first.",
    "time_s": "When it was written, in seconds since 1970.",
}
"""Fields of every event."""

_STARTED = {
    "devices": "Devices of the run, as text.",
    "data": "Description of the data.",
    "identity": "Digests and counts by which the run recognises its data.",
    "notes": "Remarks about the data, such as skipped lines.",
    "end_of_document": "Token that ends documents, and where it was found.",
    "weights": (
        "Where the parameters came from: `seed N`, or DIR@STEP of another run; null if from this"
        " run's own checkpoint."
    ),
    "launcher": "Launcher that started the processes.",
    "launch": "How the launcher was recognised.",
}
_PLAN = {"plan": "Digest of the plan.", "layout": "The plan as one line of text."}
_MOVED = {
    **_PLAN,
    "from_plan": "Digest of the plan before.",
    "why": "Reason, for people.",
    "phases_s": "Seconds of each phase of the switch, by name.",
    "step_delay_s": "Seconds for which training paused.",
}

EVENTS: Mapping[EventName, EventKind] = {
    "start": EventKind("A new run begins.", _STARTED),
    "resume": EventKind(
        "A run is resumed.",
        {
            **_STARTED,
            "lr_before": "Learning rate of the last step, if the rate or its schedule changed.",
            "lr_now": "Learning rate of the next step, likewise.",
            "lr_end": "Learning rate of the last step of the run, likewise.",
            "evaluation": "Why held-out losses cannot be compared with those from before.",
            "settings": "Settings that are not as before, by name: the value before and now.",
        },
    ),
    "plan": EventKind(
        "The run has a plan: at each start and resume.",
        {
            "digest": "Digest of the plan.",
            "layout": "The plan as one line of text.",
            "why": "Who chose it, and why.",
            "crosses": "Mesh axes that cross hosts or processes, and which of the two.",
        },
    ),
    "compile": EventKind(
        "The training step was compiled.",
        {
            "compile_time_s": "Seconds that it took.",
            "step_bytes_per_device": "Bytes that the compiled step needs on a device.",
        },
    ),
    "eval": EventKind(
        "The held-out loss was measured; null where no held-out token counts.",
        {
            "loss": "Mean over what counts of the held-out data, in the unit of a step's loss.",
            "perplexity": "Exponential of the loss; null where it overflows, or the task is not to"
            " predict tokens.",
            "bits_per_byte": "Loss in bits per byte; null unless tokens are bytes and the task is"
            " next_token.",
            "tokens": "Held-out tokens that were counted.",
            "metrics": "Metrics of the task and auxiliary sums, by name, divided by the tokens; and"
            " `word_error_rate` of the recordings that were written down.",
        },
    ),
    "checkpoint": EventKind(
        "A checkpoint is complete on the disk.",
        {"blocked_s": "Seconds for which training waited for it."},
    ),
    "decision": EventKind(
        "The controller decided, or a plan was tried before the first step.",
        {
            **_PLAN,
            "action": "`stay` or `switch`.",
            "why": "Reason, for people.",
            "trigger": "Signal that caused the decision.",
            "switch_method": "What a switch has to change: see control.md.",
            "at_step": "Step after which the switch is due; null: as soon as it is prepared.",
            "without": "Ids of devices that the plan leaves out.",
            "mandatory": "Whether the run cannot continue under the present plan.",
            "step_time_s": "Predicted seconds per step under the present plan.",
            "wait_s": "Seconds after which the decision is to be made again.",
            "inputs": "Measurements and predictions that the decision used, by name.",
            "alternatives": "The plans that were compared, best first.",
            "traceback": "Python traceback, if the controller failed.",
            "predicted_step_time_s": "Predicted seconds per step of a plan that was tried.",
            "measured_step_time_s": "Measured seconds per step of a plan that was tried.",
            "compile_time_s": "Seconds of compiling a plan that was tried.",
            "step_bytes_per_device": "Bytes per device of a plan that was tried.",
        },
    ),
    "remesh": EventKind(
        "A switch: the run moved to another plan.",
        {
            **_MOVED,
            "switch_method": "What the switch had to change.",
            "bytes_moved": "Bytes sent between devices.",
            "compile_tax_s": "Seconds by which compiling in the background slowed the steps.",
        },
    ),
    "rollback": EventKind(
        "A switch failed or was slower than before, and the run went back; `plan` is the one that"
        " it went back to.",
        _MOVED,
    ),
    "phase": EventKind(
        "Batches have another size from the next step on.",
        {
            **_PLAN,
            "from_plan": "Digest of the plan before.",
            "global_batch": "Examples per step.",
            "seq_len": "Tokens per example.",
            "examples_before": "Examples that earlier phases have used.",
            "compile_time_s": "Seconds of compiling the phase's step.",
            "was_ready": "Whether the step was compiled before the phase began.",
            "step_delay_s": "Seconds for which training paused.",
        },
    ),
    "profile": EventKind(
        "Steps were profiled.",
        {
            "first_step": "The first one; `step` is the last one.",
            "plan": "Digest of their plan.",
            "step_time_s": "Seconds of a step.",
            "parts_s": "Seconds of each part of a step, by its name; they add up to `step_time_s`.",
            "beside_s": "Seconds of exchanges that ran beside compute, by the name of their part.",
            "predicted_s": "Predicted seconds of the same parts; empty if they are unknown.",
            "memory_bytes": "Bytes of each part of a device's memory when the compiled step needs"
            " most, by its name; empty if they are unknown.",
            "predicted_bytes": "Estimated bytes of the same parts.",
            "allocated_bytes": "Bytes that XLA allocates for the step, its arguments included; null"
            " if `memory_bytes` is empty.",
            "folder": "Where the profile is, below the run directory.",
        },
    ),
    "fault": EventKind(
        "Something failed; the run may continue.",
        {
            "what": "What failed.",
            "back_to": "Checkpoint to go back to, if the run no longer learns.",
            "lowest_loss": "Lowest median of the loss, if the loss rises.",
            "since": "Step since which the loss is far above that.",
            "process": "Process that noticed it.",
            "seen_s": "When it noticed it, in seconds since 1970.",
            "doing": "What that process was doing.",
            "doing_s": "For how many seconds.",
            "entered": "Last step that it began.",
            "late": "Processes that were behind.",
            "peers": "Last heartbeat of every other process.",
            "stacks": "Python stack of every thread.",
        },
    ),
    "end": EventKind(
        "The run ended or was stopped.",
        {
            "reason": (
                "`done`, `interrupt`, `terminate`, `fault`, `not learning`, or `error` after"
                " another exception."
            ),
            "why": "Why the run no longer learns, or the error.",
            "back_to": "Checkpoint to go back to, if it no longer learns.",
        },
    ),
}
