"""`evaluate`: the held-out loss and metrics of a run's model, or of a published one.

An evaluation is what a new run that begins with these parameters measures before its first step:
the same plans, data and programs.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from optimus_jax.cluster.distributed import all_or_none, assert_same_everywhere
from optimus_jax.config import Config
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.data.batch import HostBatch
from optimus_jax.data.given import RandomAccess, check_ends, given_in_python
from optimus_jax.data.tokenizers import ByteTokenizer, Tokenizer
from optimus_jax.errors import ConfigError, DataError, OptimusError, argument, explain
from optimus_jax.mesh.build import discover
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.run.in_python import TASK, GivenData, with_objects
from optimus_jax.run.initial_weights import initial_weights
from optimus_jax.run.inputs import Inputs
from optimus_jax.run.named_run import RUN
from optimus_jax.run.parameter_source import RunSource, open_run
from optimus_jax.run.requested_config import requested_config, shared_settings
from optimus_jax.run.trained_model import (
    ALL,
    EXAMPLES_PER_DEVICE,
    FORWARD_ONLY,
    by_writer,
    connected,
    settings_of,
    trained_source,
)
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.run_data import check_same_data, identity_in_run
from optimus_jax.system.paths import UserPath
from optimus_jax.training.evaluation import held_out_sums
from optimus_jax.training.numbers import perplexity_of
from optimus_jax.training.step import build_program
from optimus_jax.training.tasks import NEXT_TOKEN, keeps_own_task, task_name, task_of, use_own_task

NUMBER, TRANSCRIBED = "evaluation.examples", "evaluation.transcribed"
LENGTH, EVAL_LENGTH = "data.seq_len", "evaluation.seq_len"
"""Settings."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What an evaluation found."""

    loss: float
    """Mean over terms, in the unit of `StepRecord.loss`."""
    term: str
    """What a term is."""
    num_terms: int
    """Terms that were measured."""
    num_examples: int
    """Examples that they are from."""
    perplexity: float | None
    """Exponential of the loss; None: it overflows, or is not of the tokens of a text."""
    bits_per_byte: float | None
    """Bits for each byte of text, with any tokenizer; None: the task is not `next_token`, or no
    text counts."""
    metrics: dict[str, float]
    """Means over terms, and rates, by name."""
    weights: str
    """Where the parameters are from: DIR@STEP of a run, or a published model."""
    plan: str
    """The plan, in words."""


@keeps_own_task()
def evaluate(
    model: UserPath,
    *,
    data: GivenData | None = None,
    step: int | None = None,
    examples: int | None = None,
    warn: Callable[[str], object] = warnings.warn,
    **overrides: Any,
) -> EvaluationResult:
    """Measure the loss and the metrics of a model's task. A plan for it must have room for a
    training step without Adam's moments.

    Args:
      model: directory or URL of a run, or DIR@STEP; directory of a published model or of PEFT's
        adapters, or hf://ORG/NAME.
      data: what to measure on, all of it: paths or items, as `train` takes them; None: what the run
        holds out, if its data was named by paths.
      step: step of the run's checkpoint; None: the newest good one.
      examples: most examples, the first ones; None: all.
      warn: called with messages about the parameters, by process 0 once processes are connected.
      overrides: settings as `train` has them: `mesh="fsdp=4,tensor=2"`, `precision="bf16"`,
        `**{"data.text_field": "body"}`. Those of a run are its own; `task` may be a Task. Without
        `mesh` the planner chooses one of all devices.
    Returns:
      The loss and the metrics, the same in every process.
    Raises:
      OptimusError: a mistake that the user can fix; the message says how.
      FaultError: another process or the network failed; try again.
    """
    overrides, objects = with_objects(overrides, data, None, overrides.pop(TASK, None))
    if objects.task is not None:
        use_own_task(objects.task)
    if objects.records is not None:
        data = objects.records
        check_ends(objects.records, "data=")
    source, adapters = trained_source(model, step)
    taken = sorted(name for name in overrides if name in ("model.labels", "model.labelled"))
    if taken and source.config().labels:
        raise ConfigError(
            explain(
                "the labels that are measured are those that the model has learnt",
                given=", ".join(f"{name}={overrides[name]}" for name in taken),
                do="leave it out, and give data with these labels",
            )
        )
    if isinstance(source, RunSource):
        run = open_run(source.named, checkpoint="none", say=warn)
        base, given = settings_of(source), {"data.tokenizer": source.tokenizer()}
        own = base.evaluation.data
        if data is None and "data.sources" not in overrides and own and not given_in_python(own):
            data, given = own, given | {"data.sources": own}
        if base.task == IN_PYTHON and TASK not in overrides:
            raise ConfigError(
                explain(
                    "what the run learns is not here: its task was an object of the program",
                    given=f"{RUN} {model}, no task",
                    do=f"name a task to measure, such as {argument('task', 'next_token')}; the"
                    " run's own evaluations are in its events.jsonl",
                )
            )
        if data is None and "data.sources" not in overrides and _is_in_python(base):
            raise ConfigError(
                explain(
                    "what the run holds out is not here: its data was an object of the program",
                    given=f"{RUN} {model}, no data",
                    do=f"name the data to measure on with {argument('data')}, of which all is"
                    " measured; the run's own evaluations are in its events.jsonl",
                )
            )
    else:
        run, base, given = None, None, {}
    if data is not None:
        given |= {"data.eval_fraction": 0.0, "evaluation.data": ()}
    elif run is None:
        raise ConfigError(
            explain(
                "a published model holds no data out",
                given=f"{RUN} {model}, no data",
                do=f"name the data to measure on with {argument('data')}",
            )
        )
    if NUMBER in overrides:
        raise ConfigError(
            explain(
                "the number of examples has an argument of its own",
                given=f"{NUMBER}={overrides[NUMBER]}",
                do=f"give {argument('examples', 'N')}",
            )
        )
    if LENGTH in overrides:  # a run's evaluations may have another length than its examples
        overrides = {EVAL_LENGTH: overrides[LENGTH], **overrides}
    asked = given | overrides | {"init_from": str(adapters or source)}
    config = requested_config(None, base, None, False, asked, False)
    if data is not None and config.data.mixture:
        raise ConfigError(
            explain(
                "data to measure on has no weights",
                given=" ".join(config.data.sources),
                do="give paths alone",
            )
        )
    number = ALL if examples is None else examples
    config = config.with_values(
        {
            **FORWARD_ONLY,
            NUMBER: number,
            TRANSCRIBED: overrides.get(TRANSCRIBED, number),
        }
    )
    with connected(config):
        return _measured(
            config,
            run if data is None else None,
            objects.records,
            warn,
            has_batch="data.global_batch" in overrides,
        )


def _is_in_python(run: Config) -> bool:
    """Whether what a run holds out is of objects of its program."""
    return given_in_python(run.data.sources) or given_in_python(run.evaluation.data)


def _measured(
    config: Config,
    run: RunDirectory | None,
    records: RandomAccess | Iterable[Any] | None,
    say: Callable[[str], object],
    *,
    has_batch: bool,
) -> EvaluationResult:
    """The result on the devices of this process, and of all others.

    Args:
      run: whose own held-out examples are measured; None: all of the data.
      records: the data, if a program gives it.
      has_batch: whether the size of batches is given.
    """
    topology = discover()
    say = by_writer(say)
    with all_or_none():
        if not has_batch:
            size = EXAMPLES_PER_DEVICE * topology.num_devices
            config = config.with_values({"data.global_batch": size})
        inputs = Inputs.of(config, run, records)
        if run is None:
            inputs = inputs.on_all_data()
        else:
            check_same_data(identity_in_run(run), inputs.data, config.data, say)
        if not inputs.num_eval_examples:
            raise DataError(
                explain(
                    "the run holds nothing out",
                    given="data.eval_fraction=0",
                    do=f"name the data to measure on with {argument('data')}",
                )
            )
        config = inputs.config
        plan = choose_plan(config, topology).plan
    assert_same_everywhere(
        shared_settings(config)
        | {"the data": str(inputs.data.identity), "the plan": plan.describe()}
    )
    program = build_program(config, plan)
    state, weights = initial_weights(config, inputs.data.identity).initial_state(program, say)
    state = replace(state, opt_state=None)
    held_out = inputs.phase_batches(program, 0).held_out
    assert held_out is not None, "there are examples to measure"
    found = held_out_sums(program, state, held_out, stops=lambda: False)
    assert found is not None, "nothing stops it"
    if not found.tokens:
        raise OptimusError(
            explain(
                f"no {task_of(config).term} counts",
                given=inputs.data.description,
                do=f"give other data, or a larger {argument('seq_len')}",
            )
        )
    task, loss = task_of(config), found.mean_loss
    return EvaluationResult(
        loss=loss,
        term=task.term,
        num_terms=found.tokens,
        num_examples=inputs.num_eval_examples,
        perplexity=_perplexity(loss) if task.has_perplexity else None,
        bits_per_byte=_bits_per_byte(found.loss, found.tokens, inputs)
        if task_name(config) == NEXT_TOKEN
        else None,
        metrics=found.mean_metrics,
        weights=weights,
        plan=plan.describe(),
    )


def _perplexity(loss: float) -> float | None:
    """None if it is not finite."""
    value = perplexity_of(loss)
    return value if math.isfinite(value) else None


def _bits_per_byte(loss: float, num_tokens: int, inputs: Inputs) -> float | None:
    """Bits for each byte of the text whose tokens count; None: there is no text in them.

    Args:
      loss: sum over these tokens, in nats.
    """
    tokenizer = inputs.data.tokenizer
    if isinstance(tokenizer, ByteTokenizer):  # as in training, where the end of a document is one
        return loss / num_tokens / math.log(2)
    num_bytes = sum(_bytes_in(batch, tokenizer) for batch in inputs.whole_held_out_batches())
    return loss / math.log(2) / num_bytes if num_bytes else None


def _bytes_in(batch: HostBatch, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the targets that count. Text that a part of a document cuts in the middle of a
    character is a few bytes off."""
    return sum(
        len(tokenizer.decode(tokens).encode())
        for row in range(len(batch["targets"]))
        for tokens in _documents(batch, row, tokenizer.eos)
    )


def _documents(batch: HostBatch, row: int, eos: int) -> Iterator[list[int]]:
    """Targets of a row that count, by document, without the token that ends it."""
    counts, segments = batch["loss_mask"][row], batch["segments"][row]
    targets = batch["targets"][row]
    for segment in dict.fromkeys(segments[counts].tolist()):
        tokens = targets[counts & (segments == segment)].tolist()
        yield [token for token in tokens if token != eos]
